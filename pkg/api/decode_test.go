package api

import (
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

// allocated returns the bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestEntriesAreCountedWhileTheyAreDecoded sends a megabyte of elements that are no entries, or too many of them.
func TestEntriesAreCountedWhileTheyAreDecoded(t *testing.T) {
	for name, c := range map[string]struct {
		element string
		want    error
	}{
		"numbers": {"0", errMalformed}, "lists": {"[]", errMalformed}, "empty objects": {"{}", errInvalid},
		"entries": {`{"payload":1}`, errTooMany}, "nulls": {"null", errMalformed},
	} {
		n := 1 << 20 / (len(c.element) + 1)
		body := []byte("[" + strings.Repeat(c.element+",", n) + c.element + "]")
		var err error
		bytes := allocated(func() { _, _, err = decode(body, 10_000) })
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if bytes > 24<<20 {
			t.Errorf("%s: a body of 1 MiB allocates %d MiB", name, bytes>>20)
		}
	}
}

func TestALineOfAStreamIsOneObject(t *testing.T) {
	line := []byte("[" + strings.Repeat("0,", 1<<20) + "0]")
	var err error
	bytes := allocated(func() { err = (&lineStream{}).decode(line, &streamLine{number: 1}) })
	if !errors.Is(err, errMalformed) || !strings.Contains(err.Error(), "one object") {
		t.Errorf("it says %v", err)
	}
	if bytes > 1<<20 {
		t.Errorf("a line of 2 MiB allocates %d KiB", bytes>>10)
	}
}

// TestMembersAreNamedExactlyAndOnce: a doubled member would hide one of its values, and encoding/json takes any case.
func TestMembersAreNamedExactlyAndOnce(t *testing.T) {
	for body, want := range map[string]string{
		`{"Payload": 1}`:                                                       `Payload: there is no such field`,
		`{"payload": 1, "payload": 2}`:                                         `payload: it is given twice`,
		`[{"payload": 1}, {"payload": 1, "FLOW": ""}]`:                         `entry 2: FLOW: there is no such field`,
		`{"payload": 1, "callback": {"URL": "https://x"}}`:                     `URL: there is no such field`,
		`{"payload": 1, "callback": {"url": "https://x", "url": "https://y"}}`: `url: it is given twice`,
	} {
		entries, _, err := decode([]byte(body), 10)
		if err == nil {
			err = (&API{}).checkCallback(entries[0].Callback)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
}

func TestAPushHasAllFieldsOfItsEntry(t *testing.T) {
	const body = `{"payload": 1, "lock_key": "k", "flow": "f", "priority": 1, "due_at": "2030-01-01T00:00:00Z", ` +
		`"start_by": "2031-01-01T00:00:00Z", "finish_by": "2032-01-01T00:00:00Z", "cost": 1, "weight": 1, "name": "n", ` +
		`"idempotency_key": "i", "unique_key": "u", "unique_policy": "while_queued", "trace": "t", "callback": {}}`
	entries, _, err := decode([]byte(body), 1)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(entries[0].push())
	if err != nil {
		t.Fatal(err)
	}
	var given, pushed map[string]any
	if err := errors.Join(json.Unmarshal([]byte(body), &given), json.Unmarshal(text, &pushed)); err != nil {
		t.Fatal(err)
	}
	if n := len(entries[0].members()); !reflect.DeepEqual(given, pushed) || len(given) != n {
		t.Errorf("%v was pushed as %v, with %d fields", given, pushed, n)
	}
}
