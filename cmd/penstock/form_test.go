package main

import (
	"strings"
	"testing"
)

// A value that no command takes is refused before anything is asked of the database or the API, by the name of its flag or
// argument, and with the form that is wanted.
func TestValuesThatNoCommandTakesAreRefusedByName(t *testing.T) {
	for line, says := range map[string]string{
		"entry list mails --limit -5":            `--limit is "-5": want 1 to 10000`,
		"entry list mails --limit 0":             `--limit is "0": want 1 to 10000`,
		"entry list mails --limit 1000001":       `--limit is "1000001": want 1 to 10000`,
		"entry list mails --after later":         `--after is "later": want a number`,
		"entry push mails 1 --priority 99999":    `--priority is "99999": the number is too large`,
		"entry wait 1 --for soon":                `--for is "soon": want a duration such as 500ms, 30s or 2h`,
		"entry wait 1 --for -5s":                 `--for is "-5s": want 0 or more`,
		"queue list --timeout -5s":               `--timeout is "-5s": want 0 or more`,
		"limit set gpus --rate NaN --reason r":   `--rate is "NaN": want a number`,
		"limit set gpus --burst Inf --reason r":  `--burst is "+Inf": want a number`,
		"limit set \x00 --max-units 1":           `LIMIT is empty`,
		"slot group \x00 --slots 1 --reason r":   `NAME is empty`,
		"entry push mails \x00":                  `PAYLOAD is empty`,
		"entry push mails 1 --name \xff":         `--name is "\xff": want UTF-8`,
		"pause set lock_key a\xffb --reason r":   `VALUE is "a\xffb": want UTF-8`,
		"entry wait 1 \x00":                      `ID is empty`,
		"pause set galaxy ann --reason r":        `SCOPE is "galaxy": want flow, name, lock_key, model, application, node`,
		"pause set queue mails --reason r":       `a queue is paused by penstock queue pause`,
		"flow weight ann NaN --reason r":         `weight is "NaN": want a number from 0.001 to 1000, or 0`,
		"entry push mails @/nonexistent/payload": "next: give the path of a file that can be read",
	} {
		args := strings.Fields(line)
		for i, arg := range args {
			args[i] = strings.ReplaceAll(arg, "\x00", "")
		}
		if _, errs, code := command(t, &fake{}, args...); code != exitUsage || !strings.Contains(errs, says) {
			t.Errorf("%q: exit %d, %s; want %d, %s", line, code, errs, exitUsage, says)
		}
	}
}

// An entry may have no flow: the empty name is that of such entries.
func TestEntriesWithoutAFlowHaveTheEmptyName(t *testing.T) {
	if _, errs, _ := command(t, &fake{}, "pause", "set", "flow", "", "--reason", "r", "--dry-run"); errs != "" {
		t.Error(errs)
	}
}
