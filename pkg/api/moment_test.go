package api

import (
	"testing"
	"time"
)

func TestAPauseEndsAtATimeOrAfterADuration(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	accepted := 204 // the first pause replaces none
	for until, want := range map[string]time.Time{`"1h"`: at, `"` + at.Format(time.RFC3339) + `"`: at, `null`: {}} {
		status, body := w.send("POST", "/v1/queues/work/pause", `{"until": `+until+`, `+reason+`}`)
		if status != accepted {
			t.Fatalf("until %s: %d %v", until, status, body)
		}
		replaced, _ := body["replaced"].(map[string]any)
		if accepted == 200 && (replaced["reason"] != "a test" || replaced["since"] == nil) {
			t.Errorf("until %s: %v, want the pause that is replaced", until, body)
		}
		accepted = 200
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
