package api

import (
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
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

// A leader whose clock was behind the database's refused short pauses, and a long one ended too early; so with all that
// ends after a duration.
func TestDurationsCountFromTheDatabasesClock(t *testing.T) {
	w := newWorld(t)
	tx := pgtest.ClockAhead(t, w.pool, `2 hours`)
	w.api = New(tx, Config{Open: true})
	if _, err := tx.Exec(t.Context(), `
SELECT penstock.create_queue('work'), penstock.create_queue('tick', '{"kind": "cron"}');
SELECT penstock.create_cron_job('nightly', 'tick', '@daily');
SELECT penstock.register_model('llama', '{"protocol": "openai"}');
SELECT penstock.set_deployment(n, 'llama', '{}') FROM unnest(ARRAY['own', 'spot']) n`); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ method, path, body, ends string }{
		{"POST", "/v1/queues/work/pause", `"until": "1h"`, `SELECT paused_until FROM penstock.queue WHERE name = 'work'`},
		{"POST", "/v1/cron/nightly/pause", `"until": "1h"`, `SELECT paused_until FROM penstock.cron_job`},
		{"POST", "/v1/pauses", `"scope": "flow", "value": "acme", "until": "1h"`, `SELECT until FROM penstock.pause`},
		{"PUT", "/v1/scale/override", `"deployment": "own", "instances": 2, "until": "1h"`, `SELECT override_until FROM penstock.deployment WHERE name = 'own'`},
		{"POST", "/models/schedule_externally", `"model": "llama", "replicas": 3, "until": "1h"`, `SELECT override_until FROM penstock.deployment WHERE name = 'spot'`},
		{"POST", "/models/scale?model=llama", ``, `SELECT override_until FROM penstock.deployment WHERE name = 'own'`},
		{"POST", "/v1/tokens", `"name": "ci", "scopes": ["read"], "expires_at": "1h"`, `SELECT expires_at FROM penstock.api_token`},
		{"POST", "/v1/tokens/ci/rotate", `"overlap_seconds": 0, "expires_at": "1h"`, `SELECT max(expires_at) FROM penstock.api_token`},
	} {
		body := ""
		if c.body != "" {
			body = `{` + c.body + `, ` + reason + `}`
		}
		if status, answer := w.send(c.method, c.path, body); status >= http.StatusBadRequest {
			t.Errorf("%s: %d %v", c.path, status, answer)
			continue
		}
		var left float64
		if err := tx.QueryRow(t.Context(), `SELECT extract(epoch FROM (`+c.ends+`) - clock_timestamp())`).Scan(&left); err != nil {
			t.Fatal(err)
		}
		if left < 3000 || left > 3600 {
			t.Errorf("%s ends in %.0f s, want in an hour", c.path, left)
		}
	}
	// The sum of an override that holds by the database's clock alone, and of one more.
	if _, answer := w.send("POST", "/models/scale?model=llama", ""); answer["instances"] != 4. {
		t.Errorf("after two additions to 2 instances: %v", answer)
	}
}
