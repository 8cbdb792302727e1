package api

import (
	"testing"
	"time"
)

func TestAPauseEndsAtATimeOrAfterADuration(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	for until, want := range map[string]time.Time{`"1h"`: at, `"` + at.Format(time.RFC3339) + `"`: at, `null`: {}} {
		if status, answer := w.send("POST", "/v1/queues/work/pause", `{"until": `+until+`, `+reason+`}`); status != 204 {
			t.Fatalf("until %s: %d %v", until, status, answer)
		}
		_, queue := w.send("GET", "/v1/queues/work", "")
		text, _ := queue["paused_until"].(string)
		got, err := time.Parse(time.RFC3339, text)
		if want.IsZero() != (text == "") || !want.IsZero() && (err != nil || got.Sub(want).Abs() > time.Minute) {
			t.Errorf("until %s: it ends at %q, want %v", until, text, want)
		}
	}
	for _, until := range []string{`"-1h"`, `"tomorrow"`, `7`, `""`} {
		status, answer := w.send("POST", "/v1/queues/work/pause", `{"until": `+until+`, `+reason+`}`)
		if status != 422 || flawAt(answer) != "body.until" {
			t.Errorf("until %s: %d %v, want 422 that names the field", until, status, answer)
		}
	}
}
