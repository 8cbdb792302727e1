package main

import (
	"strings"
	"testing"
)

// A dry run of a change of a thing that is not there ends as the change would.
func TestADryRunFindsItsObjects(t *testing.T) {
	s := newSession(t)
	for _, line := range []string{
		"queue create mails --reason r", "entry push mails {}", "limit set provider --max-units 5 --reason r",
		"pause set flow ann --queue mails --reason r", "token create ci --scope read --reason r",
		`model register llama '{"protocol": "openai"}' --reason r`,
		"instance register llama gpu-1 http://127.0.0.1:1 --slots 2 --reason r",
	} {
		if got := s.penstock(line); strings.Contains(got, "[exit") {
			t.Fatalf("%s: %s", line, got)
		}
	}
	for line, found := range map[string]bool{
		"entry cancel 1": true, "entry cancel 1 999": false, "entry disable 1": true, "entry disable 999": false,
		"entry disable --queue mails --name x": true, "entry disable --queue nobody --name x": false,
		"failure retry 999": false, "failure discard 999": false,
		"limit use mails provider": true, "limit use nobody provider": false, "limit use mails nothing": false,
		"pause set flow ann": true, "pause set flow ann --queue nobody": false,
		"pause end flow ann --queue mails": true, "pause end flow ann": false,
		"token rotate ci": true, "token rotate nobody": false, "token revoke ci": true, "token revoke nobody": false,
		"instance drain llama gpu-1": true, "instance drain llama gpu-2": false,
		"instance remove llama gpu-1": true, "instance remove llama gpu-2": false,
		"model remove llama": true, "model remove nothing": false,
		"flow weight ann 2 --queue mails": true, "flow weight ann 2 --queue nobody": false,
	} {
		got := s.penstock(line + " --dry-run")
		if found != strings.HasPrefix(got, "would ") || !found && !strings.Contains(got, "[exit 3]") {
			t.Errorf("%s --dry-run: %s", line, got)
		}
	}
	if got := s.penstock("entry show 1"); strings.Contains(got, "cancelled") {
		t.Errorf("a dry run cancelled the entry: %s", got)
	}
}

// Cancelling cannot be taken back. Of several entries each verdict is counted.
func TestCancelAsksAndCountsVerdicts(t *testing.T) {
	s := newSession(t)
	s.penstock("queue create mails --reason r")
	for range 3 {
		s.penstock("entry push mails {}")
	}
	s.world(strings.Fields("claim mails 7001 1"))
	if got := s.penstock("entry cancel 1 2 3 --reason r"); !strings.Contains(got, "[exit 7]") {
		t.Errorf("without a terminal and --yes: %s", got)
	}
	got := s.penstock("entry cancel 1 2 3 --reason r --yes")
	if want := "cancel entry: 3 of them: 2 cancelled, 1 requested; the node that runs it hears of it at its heartbeat\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
