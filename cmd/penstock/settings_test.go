package main

import (
	"os"
	"strings"
	"testing"
)

// The manual has a row for each setting that a queue can be given.
func TestEachSettingOfAQueueIsInTheManual(t *testing.T) {
	manual, err := os.ReadFile("../../docs/queue-kinds.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(manual), "## Settings of a queue\n")
	section, _, _ := strings.Cut(rest, "\n## ")
	for _, setting := range settings {
		var found bool
		for line := range strings.Lines(section) {
			names, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
			found = found || strings.HasPrefix(line, "| `") && strings.Contains(names, "`"+setting+"`")
		}
		if !found {
			t.Errorf("docs/queue-kinds.md has no row for the setting %s", setting)
		}
	}
}
