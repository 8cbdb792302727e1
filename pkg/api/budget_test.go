package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// token makes a token and returns its secret.
func (w *world) token(fields string) string {
	w.t.Helper()
	status, answer := w.send("POST", "/v1/tokens", `{`+fields+`, `+reason+`}`)
	secret, _ := answer["secret"].(string)
	if status != http.StatusCreated {
		w.t.Fatalf("create token: %d %v", status, answer)
	}
	return secret
}

func TestATokenBeyondItsGPUTimeIsRefusedUntilTheNextPeriod(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	for fields, want := range map[string]string{
		`"gpu_ms": 1000, "gpu_period": "hour"`:                  "with flows",
		`"gpu_ms": 1000, "flows": ["acme"]`:                     "gpu_period",
		`"gpu_ms": 0, "gpu_period": "hour", "flows": ["acme"]`:  "gpu_ms",
		`"gpu_ms": 10, "gpu_period": "year", "flows": ["acme"]`: "gpu_period",
	} {
		status, answer := w.send("POST", "/v1/tokens", `{"name": "bad", "scopes": ["push"], `+fields+`, `+reason+`}`)
		if status != http.StatusUnprocessableEntity || !strings.Contains(fmt.Sprint(answer), want) {
			t.Errorf("%s: %d %v, want 422 that names %s", fields, status, answer, want)
		}
	}
	secret := w.token(`"name": "acme", "scopes": ["push"], "flows": ["acme"], "gpu_ms": 1000, "gpu_period": "hour"`)
	hourLasts()
	used := func(hour, flow string, ms int) {
		w.exec(fmt.Sprintf(`
INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
SELECT date_trunc('hour', now(), 'UTC') - interval '%s', id, 'm', '%s', 1, %d, 0, 0, 0, 0 FROM penstock.queue WHERE name = 'work'`,
			hour, flow, ms))
	}
	used("1 hour", "acme", 5000) // of the hour before
	used("0", "other", 5000)
	w.api = New(w.pool, Config{})
	push := func(path, body string, header ...string) (status int, after, said string) {
		answered := w.ask(secret, "POST", path, body, header...)
		return answered.Code, answered.Header().Get("Retry-After"), answered.Body.String()
	}
	const entries = "/v1/queues/work/entries"
	if status, _, said := push(entries, `{"payload": 1}`); status != http.StatusCreated {
		t.Fatalf("within the budget: %d %s", status, said)
	}
	used("0", "acme2", 5000)       // no flow below acme
	used("0", "acme/nightly", 400) // of the gateway
	used("0", "acme", 600)
	w.api = New(w.pool, Config{}) // what it read of the budget is kept for two seconds
	left := time.Until(time.Now().UTC().Truncate(time.Hour).Add(time.Hour)).Seconds()
	for name, try := range map[string]func() (int, string, string){
		"an entry": func() (int, string, string) { return push(entries, `{"payload": 1}`) },
		"a stream": func() (int, string, string) {
			return push(entries, `{"payload": 1}`+"\n", "Content-Type", "application/x-ndjson")
		},
		"a stream with a bad line": func() (int, string, string) {
			return push(entries, "{bad}\n"+`{"payload": 1}`+"\n", "Content-Type", "application/x-ndjson")
		},
	} {
		status, after, said := try()
		seconds, err := strconv.ParseFloat(after, 64)
		if status != http.StatusTooManyRequests || !strings.Contains(said, "1000 of 1000 GPU milliseconds of this hour") {
			t.Errorf("%s beyond the budget: %d %s", name, status, said)
		}
		if err != nil || seconds < left-30 || seconds > left+30 {
			t.Errorf("%s: Retry-After is %s, and the hour ends in %.0f s", name, after, left)
		}
	}
}

// hourLasts returns when the hour lasts for a minute more: budgets go by the hours of UTC.
func hourLasts() {
	for time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)) < time.Minute {
		time.Sleep(100 * time.Millisecond)
	}
}

// Lines that cannot be read cost nothing, so that a budget which is spent or cannot be read does not refuse them.
func TestAStreamOfBadLinesIsAnsweredWhateverItsBudget(t *testing.T) {
	for name, refusal := range map[string]error{
		"spent":  &rateError{text: "the calls of its flows have taken 5 of 5 GPU milliseconds of this hour", wait: time.Minute},
		"unread": fmt.Errorf("read the GPU time of token: %w", io.ErrUnexpectedEOF),
	} {
		t.Run(name, func(t *testing.T) {
			answered := httptest.NewRecorder()
			s := &lineStream{
				answers: &answers{w: answered, rc: http.NewResponseController(answered)},
				allowed: func(context.Context) error { return nil },
				spend:   func(int) (int, error) { return 0, refusal },
			}
			err := s.run(t.Context(), strings.NewReader("{bad}\n{worse}\n"), func() {})
			if sum := s.answers.sum; err != nil || sum.Lines != 2 || sum.Refused != 2 || len(sum.Errors) != 2 {
				t.Errorf("%v, %+v, want two refused lines and the end of the body", err, sum)
			}
		})
	}
}

// A secret that is refused from its beginning helps nobody, and a rotation to one would lock the client out.
func TestATokenEndsInATimeToCome(t *testing.T) {
	w := newWorld(t)
	w.token(`"name": "ci", "scopes": ["push"]`)
	for path, fields := range map[string]string{
		"/v1/tokens":           `"name": "late", "scopes": ["push"], "expires_at": "2020-01-01T00:00:00Z"`,
		"/v1/tokens/ci/rotate": `"overlap_seconds": 0, "expires_at": "2020-01-01T00:00:00Z"`,
	} {
		status, answer := w.send("POST", path, `{`+fields+`, `+reason+`}`)
		if status != http.StatusUnprocessableEntity || !strings.Contains(fmt.Sprint(answer), "expires_at") {
			t.Errorf("%s with an end in the past: %d %v, want 422 that names expires_at", path, status, answer)
		}
	}
	_, tokens := w.send("GET", "/v1/tokens", "")
	if text := fmt.Sprint(tokens); strings.Contains(text, "late") || strings.Contains(text, "live:false") {
		t.Errorf("after two refusals the tokens are %s", text)
	}
}

func TestAnnouncementsNeedTheirScopeAndStayWithinTheLimitsOfTheirToken(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.register_model('flux', '{"protocol": "cog"}'), penstock.register_model('llama', '{"protocol": "openai"}')`)
	w.exec(`UPDATE penstock.queue SET application = 'art' WHERE model = 'flux'`)
	tokens := map[string]string{
		"announce":  w.token(`"name": "a", "scopes": ["announce"], "queues": ["flux"]`),
		"any":       w.token(`"name": "b", "scopes": ["announce"]`),
		"push":      w.token(`"name": "c", "scopes": ["push", "read"]`),
		"operate":   w.token(`"name": "d", "scopes": ["operate"]`),
		"admin":     w.token(`"name": "e", "scopes": ["admin"]`),
		"art admin": w.token(`"name": "f", "scopes": ["admin"], "applications": ["art"]`),
	}
	w.api = New(w.pool, Config{})
	for who, want := range map[string][2]int{
		"announce": {200, 403}, "any": {200, 200}, "push": {403, 403}, "operate": {403, 403}, "admin": {200, 200}, "art admin": {403, 403},
	} {
		for i, model := range []string{"flux", "llama"} {
			answered := w.ask(tokens[who], "POST", "/v1/instances/"+model+"/gpu-1/announce", `{"endpoint": "http://gpu-1:8000", "slots": 2}`)
			if answered.Code != want[i] {
				t.Errorf("%s announces an instance of %s: %d %s, want %d", who, model, answered.Code, answered.Body, want[i])
			}
		}
	}
	for _, path := range []string{"/v1/queues", "/v1/instances", "/v1/tokens"} {
		if answered := w.ask(tokens["any"], "GET", path, ""); answered.Code != http.StatusForbidden {
			t.Errorf("scope announce reads %s: %d", path, answered.Code)
		}
	}
}

// A push to a full queue is told a time after which it is accepted: not later than that, and not long before.
func TestRetryAfterOfAFullQueueIsTrue(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work', '{"capacity": 200}')`)
	w.exec(`SELECT penstock.push_many('work', array_fill('1'::jsonb, ARRAY[200]))`)
	drain := func(n int) { // as ends of entries do
		w.exec(fmt.Sprintf(`
WITH gone AS (DELETE FROM penstock.entry WHERE id IN (SELECT id FROM penstock.entry ORDER BY id LIMIT %d) RETURNING queue_id, id),
     ready AS (DELETE FROM penstock.ready r USING gone g WHERE r.queue_id = g.queue_id AND r.entry_id = g.id)
SELECT penstock.count(queue_id, 'removed', count(*)) FROM gone GROUP BY queue_id`, n))
	}
	w.exec(`UPDATE penstock.depth SET drain_rate = 10`)
	entries := func(n int) string { return "[" + strings.TrimSuffix(strings.Repeat(`{"payload": 1},`, n), ",") + "]" }
	const path = "/v1/queues/work/entries"
	status, answer := w.send("POST", path, entries(50))
	ms, _ := answer["retry_after_ms"].(float64)
	if status != http.StatusTooManyRequests || ms != 5000 {
		t.Fatalf("%d %v, want 429 and 5 s: 50 entries at 10 a second", status, answer)
	}
	drain(int(ms/1000*10) - 5) // half a second before
	if status, answer := w.send("POST", path, entries(50)); status != http.StatusTooManyRequests || answer["retry_after_ms"] != 500. {
		t.Errorf("before the time: %d %v, want 429 and the half second that is left", status, answer)
	}
	drain(5)
	if status, answer := w.send("POST", path, entries(50)); status != http.StatusCreated {
		t.Errorf("at the time: %d %v", status, answer)
	}
}

// The sums over a day of usage take their time, and may wait: a client that is told to come back before the period ends
// is refused again.
func TestAPeriodEndsNoEarlierWhereItsReadingWaited(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	var ends time.Time
	const endsSQL = `SELECT date_trunc('day', clock_timestamp(), 'UTC') + interval '1 day'`
	if err := w.pool.QueryRow(ctx, endsSQL).Scan(&ends); err != nil {
		t.Fatal(err)
	}
	gate, err := w.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gate.Exec(ctx, `LOCK TABLE penstock.usage_hour`); err != nil {
		t.Fatal(err)
	}
	read := make(chan spending, 1)
	go func() {
		var b gpuTimeBudgets
		token := operator.APIToken{Name: "acme", GPUPeriod: new("day")}
		s, err := b.spent(ctx, operator.New(w.pool), caller{APIToken: token})
		if err != nil {
			t.Error(err)
		}
		read <- s
	}()
	const waits = `
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE $1::int = ANY (pg_blocking_pids(pid)) AND query_start < clock_timestamp() - interval '50 ms')`
	for blocked, late := false, time.Now().Add(time.Minute); !blocked; time.Sleep(time.Millisecond) {
		err := w.pool.QueryRow(ctx, waits, gate.Conn().PgConn().PID()).Scan(&blocked)
		if err != nil || time.Now().After(late) {
			t.Fatalf("the reading does not wait (%v)", err)
		}
	}
	if err := gate.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if s := <-read; s.ends.Before(ends.Add(-10 * time.Millisecond)) {
		t.Errorf("the period ends %v early", ends.Sub(s.ends))
	}
}
