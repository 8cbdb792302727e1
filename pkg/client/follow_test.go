package client

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

func FuzzEvent(f *testing.F) {
	for _, seed := range []string{
		"id: a.b.c\nevent: output\ndata: {\"token\": 1, \"seq\": 2, \"data\": \"x\"}\n\n", ": still here\n\nevent: ended\ndata: {\"id\": 1}\n\n",
		"event: output\ndata: {\"data_base64\": \"!\"}\n\n", "event: x\n\n", "data", "\r\n\r\n",
	} {
		f.Add(seed, seed)
	}
	f.Fuzz(func(t *testing.T, text, output string) {
		in := bufio.NewReader(strings.NewReader(text))
		for {
			e, err := readEvent(in)
			if err != nil {
				break
			}
			if e.Kind == "" {
				t.Fatalf("%q has an event without a name", text)
			}
		}
		if !utf8.ValidString(output) {
			return // the server sends it as data_base64
		}
		data, err := json.Marshal(map[string]any{"token": 7, "seq": 3, "data": output})
		if err != nil {
			t.Fatal(err)
		}
		e, err := readEvent(bufio.NewReader(strings.NewReader(fmt.Sprintf("id: 1.2.3\nevent: output\ndata: %s\n\n", data))))
		if err != nil || e.Kind != "output" || e.ID != "1.2.3" || e.Token != 7 || e.Seq != 3 || !bytes.Equal(e.Output, []byte(output)) {
			t.Errorf("%q was read as %+v (%v)", output, e, err)
		}
	})
}
