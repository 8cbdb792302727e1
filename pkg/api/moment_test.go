package api

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
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

func TestDurationsOfAPushCountFromTheDatabasesClock(t *testing.T) {
	w := newWorld(t)
	tx := pgtest.ClockAhead(t, w.pool, `2 hours`)
	w.api = New(tx, Config{Open: true})
	if _, err := tx.Exec(t.Context(), `SELECT penstock.create_queue('work')`); err != nil {
		t.Fatal(err)
	}
	const entry, entries = `{"payload": 1, "due_at": "1h", "start_by": "2h", "finish_by": "3h"}`, "/v1/queues/work/entries"
	for n, c := range []struct{ media, body string }{
		{"application/json", entry},
		{"application/json", `[{"payload": 2}, ` + entry + `]`},
		{"application/x-ndjson", `{"payload": 2}` + "\n" + entry + "\n"},
	} {
		if status, answer := w.send("POST", entries, c.body, "Content-Type", c.media); status >= http.StatusBadRequest {
			t.Fatalf("%s: %d %v", c.body, status, answer)
		}
		var found int
		if err := tx.QueryRow(t.Context(), `
SELECT count(*) FROM penstock.entry
 WHERE due_at - clock_timestamp() BETWEEN interval '55 minutes' AND interval '1 hour'
   AND (start_by, finish_by) = (due_at + interval '1 hour', due_at + interval '2 hours')`).Scan(&found); err != nil {
			t.Fatal(err)
		}
		if found != n+1 {
			t.Errorf("%s: %d entries with the times that were given, want %d", c.body, found, n+1)
		}
	}
	for _, due := range []string{`"-1h"`, `"tomorrow"`, `7`, `""`} {
		status, answer := w.send("POST", entries, `{"payload": 1, "due_at": `+due+`}`)
		if status != 422 || flawAt(answer) != "body.due_at" {
			t.Errorf("due at %s: %d %v, want 422 that names the field", due, status, answer)
		}
	}
}

// The clock is read once for the lines that are pushed together, and where it cannot be read no line is refused for it.
func TestTheClockIsReadOnceForTheLinesOfAChunk(t *testing.T) {
	read, away := 0, error(nil)
	stream := func(body string) (Streamed, error) {
		w := httptest.NewRecorder()
		s := &lineStream{
			allowed: func(context.Context) error { return nil }, queue: &sink{}, timeout: time.Minute, pushOf: (&API{}).plain,
			answers: &answers{w: w, rc: http.NewResponseController(w)}, spend: func(n int) (int, error) { return n, nil },
			registerKey: func(string) (func(), error) { return func() {}, nil },
			now:         func(context.Context) (time.Time, error) { read++; return time.Now(), away },
		}
		var chunk []*streamLine
		for n, text := range strings.Split(body, "\n") {
			line := &streamLine{number: int64(n + 1)}
			line.err = s.decode([]byte(text), line)
			chunk = append(chunk, line)
		}
		n, err := s.accept(t.Context(), chunk)
		if werr := s.answers.add(chunk[:n]); werr != nil {
			t.Error(werr)
		}
		return s.answers.sum, err
	}
	if sum, err := stream(`{"payload": 1}`); err != nil || sum.Inserted != 1 || read != 0 {
		t.Errorf("without a duration the clock was read %d times: %+v (%v)", read, sum, err)
	}
	const lines = `{"payload": 1, "due_at": "1h"}` + "\n" + `{"payload": 2, "start_by": "1h", "finish_by": "2h"}`
	if sum, err := stream(lines); err != nil || sum.Inserted != 2 || read != 1 {
		t.Errorf("of two lines the clock was read %d times: %+v (%v)", read, sum, err)
	}
	away = errors.New("the database is away")
	if sum, err := stream(lines); err == nil || sum.Lines != 0 || sum.Refused != 0 {
		t.Errorf("without a clock: %+v (%v)", sum, err)
	}
}
