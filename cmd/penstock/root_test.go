package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestAMisspeltVerbIsAnsweredWithTheOneThatWasMeant(t *testing.T) {
	for line, says := range map[string]string{
		"queue shwo x":  `"shwo" is not a verb of penstock queue: did you mean show?`,
		"entry explan":  `"explan" is not a verb of penstock entry: did you mean explain?`,
		"queue destroy": `"destroy" is not a verb of penstock queue` + "\n",
	} {
		var out bytes.Buffer
		a := newApp(strings.NewReader(""), &out, &out, func(string) string { return "" })
		if code := run(t.Context(), a, strings.Fields(line)); code != exitUsage || !strings.Contains(out.String(), says) {
			t.Errorf("%s: exit %d: %s", line, code, out.String())
		}
	}
}
