package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
)

type server struct {
	t    *testing.T
	pool *pgxpool.Pool
	*api.API
}

func newServer(t *testing.T, cfg api.Config, queue invalidation.Config) *server {
	t.Helper()
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", queue); err != nil {
		t.Fatal(err)
	}
	cfg.Open = true
	return &server{t: t, pool: pool, API: api.New(pool, api.Patient(cfg))}
}

// do sends a request and reads the answer into a map. Headers are name and value in turn.
func (s *server) do(method, path, body string, headers ...string) (status int, answer map[string]any, header http.Header) {
	s.t.Helper()
	r := httptest.NewRequestWithContext(s.t.Context(), method, path, strings.NewReader(body))
	r.Host = "localhost"
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
		s.t.Fatalf("%s %s: answer is not JSON: %s", method, path, w.Body)
	}
	return w.Code, answer, w.Header()
}

const entries = "/v1/queues/work/entries"

func TestPushOfOneAndOfMany(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{})
	status, one, header := s.do("POST", entries, `{"payload": {"n": 1}, "lock_key": "k", "flow": "f", "priority": 3, "name": "x"}`)
	if status != 201 || one["verdict"] != "inserted" || header.Get("Location") != fmt.Sprintf("/v1/entries/%v", one["id"]) {
		t.Errorf("one: %d %v, Location %q", status, one, header.Get("Location"))
	}
	status, many, _ := s.do("POST", entries, `[{"payload": 1}, {"payload": null, "due_at": "2100-01-01T00:00:00Z"}]`)
	if list, _ := many["entries"].([]any); status != 201 || len(list) != 2 {
		t.Errorf("many: %d %v", status, many)
	}
	status, none, _ := s.do("POST", entries, `[]`)
	if list, _ := none["entries"].([]any); status != 200 || len(list) != 0 {
		t.Errorf("none: %d %v", status, none)
	}
	var n int
	err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry WHERE (lock_key, flow, priority, name) = ('k', 'f', 3, 'x') OR status = 'initial' OR payload = '1'`).Scan(&n)
	if err != nil || n != 3 {
		t.Errorf("%d of 3 entries are stored as pushed (%v)", n, err)
	}
}

// hint is what nodes hear about a push.
type hint struct {
	queue int32
	lane  *invalidation.Lane
}

// hearing returns a server with a queue, and what nodes hear of pushes to it.
func hearing(t *testing.T) (*server, *invalidation.Queue, <-chan hint) {
	t.Helper()
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	heard := make(chan hint, 10_000)
	listener := invalidation.NewListener(invalidation.ListenConfig{
		Conn: pool.Config().ConnConfig, EchoWithin: time.Minute, // a hint that is sent while it connects anew is lost
		Wake: func(queue int32, lane *invalidation.Lane) { heard <- hint{queue, lane} },
	})
	hinter := invalidation.NewHinter(pool, 0)
	var wg sync.WaitGroup
	wg.Go(func() { _ = listener.Run(ctx) })
	wg.Go(func() { _ = hinter.Run(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	for deadline := time.Now().Add(time.Minute); !listener.Status().Connected; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the listener is not connected")
		}
	}
	return &server{t: t, pool: pool, API: api.New(pool, api.Config{Open: true, Hinter: hinter})}, q, heard
}

func TestPushHintsAtItsQueue(t *testing.T) {
	s, q, heard := hearing(t)
	s.do("POST", entries, `{"payload": 1}`)
	select {
	case h := <-heard:
		if h.queue != q.ID {
			t.Errorf("hint at queue %d, want %d", h.queue, q.ID)
		}
	case <-time.After(time.Minute):
		t.Error("no hint")
	}
}

// A leader serves for weeks, and settings are changed by other leaders and in SQL.
func TestPushesHintAtTheLanesOfTheSettingsOfTheirQueue(t *testing.T) {
	s, _, heard := hearing(t)
	for _, c := range []struct {
		change string
		want   *invalidation.Lane
	}{
		{`{}`, &invalidation.Lane{Priority: 1}},
		{`{"entry_priority": 7}`, &invalidation.Lane{Priority: 7}},
		{`{"shards": 2}`, nil},
	} {
		if _, err := s.pool.Exec(t.Context(), `SELECT penstock.alter_queue('work', $1)`, c.change); err != nil {
			t.Fatal(err)
		}
		deadline := time.After(time.Minute)
		for hinted := false; !hinted; {
			s.do("POST", entries, `{"payload": 1}`)
			select {
			case h := <-heard:
				hinted = (h.lane == nil) == (c.want == nil) && (h.lane == nil || *h.lane == *c.want)
			case <-time.After(time.Second): // a hint may be lost
			case <-deadline:
				t.Fatalf("after %s no hint names the lane %+v", c.change, c.want)
			}
		}
	}
}

// deaf does not answer the statement that opens a queue, while mute is set.
type deaf struct {
	postgres.DB
	mute  atomic.Bool
	asked atomic.Int64
}

func (d *deaf) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.mute.Load() && strings.HasPrefix(sql, "\nSELECT id, name, ") {
		d.asked.Add(1)
		<-ctx.Done()
	}
	return d.DB.Query(ctx, sql, args...)
}

func TestAPushUsesTheKnownHandleWhereTheSettingsOfItsQueueCannotBeRead(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	db := &deaf{DB: pool}
	s := &server{t: t, pool: pool, API: api.New(db, api.Config{Open: true})}
	push := func(want int) {
		t.Helper()
		if status, answer, _ := s.do("POST", entries, `{"payload": 1}`); status != want {
			t.Fatalf("answered %d %v, want %d", status, answer, want)
		}
	}
	push(http.StatusCreated)
	db.mute.Store(true)
	for deadline := time.Now().Add(time.Minute); db.asked.Load() == 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the settings of the queue are not read again")
		}
		push(http.StatusCreated)
	}
	db.mute.Store(false)
	if _, err := pool.Exec(t.Context(), `SELECT penstock.drop_queue('work', true)`); err != nil {
		t.Fatal(err)
	}
	push(http.StatusNotFound)
}

func TestSameIdempotencyKeyGivesTheSameEntries(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{})
	_, first, _ := s.do("POST", entries, `{"payload": 1}`, "Idempotency-Key", "a")
	status, again, _ := s.do("POST", entries, `{"payload": 1}`, "Idempotency-Key", `"a"`)
	if status != 200 || again["id"] != first["id"] || again["verdict"] != "replayed" {
		t.Errorf("again: %d %v, first %v", status, again, first)
	}
	status, problem, _ := s.do("POST", entries, `{"payload": 2}`, "Idempotency-Key", "a")
	if status != 422 || problem["code"] != "idempotency_conflict" {
		t.Errorf("other body: %d %v", status, problem)
	}
	_, many, _ := s.do("POST", entries, `[{"payload": 1}, {"payload": 2}]`, "Idempotency-Key", "b")
	status, manyAgain, _ := s.do("POST", entries, `[{"payload": 1}, {"payload": 2}]`, "Idempotency-Key", "b")
	if fmt.Sprint(ids(many)) != fmt.Sprint(ids(manyAgain)) || status != 200 {
		t.Errorf("many again: %d %v, first %v", status, manyAgain, many)
	}
}

func ids(answer map[string]any) (all []any) {
	list, _ := answer["entries"].([]any)
	for _, e := range list {
		if m, ok := e.(map[string]any); ok {
			all = append(all, m["id"])
		}
	}
	return all
}

func TestHundredPushesOfOneKeyAtOnceMakeOneEntry(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{})
	var wg sync.WaitGroup
	seen := make(chan any, 100)
	for range 100 {
		wg.Go(func() {
			r := httptest.NewRequestWithContext(t.Context(), "POST", entries, strings.NewReader(`{"payload": 1}`))
			r.Host = "localhost"
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Idempotency-Key", "a")
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			var answer map[string]any
			if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || w.Code >= 300 {
				t.Errorf("answer %d: %s", w.Code, w.Body)
			}
			seen <- answer["id"]
		})
	}
	wg.Wait()
	close(seen)
	distinct := map[any]bool{}
	for id := range seen {
		distinct[id] = true
	}
	if len(distinct) != 1 {
		t.Errorf("%d entries, want 1", len(distinct))
	}
}

func TestEachErrorIsAProblemDocumentWithItsStatus(t *testing.T) {
	s := newServer(t, api.Config{BodyBytesMax: 4096, EntriesMax: 3}, invalidation.Config{PayloadLimit: 1000})
	large := `{"payload": "` + strings.Repeat("x", 2000) + `"}`
	for _, c := range []struct {
		name, method, path, body, code string
		headers                        []string
		status                         int
	}{
		{name: "no such queue", method: "POST", path: "/v1/queues/nowhere/entries", body: `{"payload": 1}`, status: 404, code: "queue_not_found"},
		{name: "no such entry", method: "GET", path: "/v1/entries/17", status: 404, code: "entry_not_found"},
		{name: "no id", method: "GET", path: "/v1/entries/x", status: 422, code: "invalid"},
		{name: "no such address", method: "GET", path: "/v2", status: 404, code: "no_such_address"},
		{name: "other method", method: "DELETE", path: entries, status: 405, code: "method_not_allowed"},
		{name: "options", method: "OPTIONS", path: entries, status: 405, code: "method_not_allowed"},
		{name: "batch with a key", method: "POST", path: "/v1/queues/work/batches", body: `{}`, headers: []string{"Idempotency-Key", "b"}, status: 422, code: "invalid"},
		{name: "no JSON", method: "POST", path: entries, body: `{`, status: 400, code: "malformed"},
		{name: "more than JSON", method: "POST", path: entries, body: `{"payload": 1} x`, status: 400, code: "malformed"},
		{name: "no payload", method: "POST", path: entries, body: `{"flow": "f"}`, status: 422, code: "invalid"},
		{name: "no such option", method: "POST", path: entries, body: `{"payload": 1, "lockkey": "k"}`, status: 422, code: "invalid"},
		{name: "no parameters", method: "POST", path: entries + "?flow=acme", body: `{"payload": 1}`, status: 422, code: "invalid"},
		{name: "two keys", method: "POST", path: entries, body: `{"payload": 1, "idempotency_key": "a"}`, headers: []string{"Idempotency-Key", "b"}, status: 400, code: "malformed"},
		{name: "no media type", method: "POST", path: entries, body: `{"payload": 1}`, headers: []string{"Content-Type", "text/plain"}, status: 415, code: "not_json"},
		{name: "bad option", method: "POST", path: entries, body: `{"payload": 1, "priority": 10}`, status: 422, code: "invalid"},
		{name: "NUL", method: "POST", path: entries, body: `{"payload": "\u0000"}`, status: 422, code: "invalid"},
		{name: "no time between", method: "GET", path: "/v1/usage/hours?from=2026-02-01T00:00:00Z&to=2026-01-01T00:00:00Z", status: 422, code: "invalid"},
		{name: "large payload", method: "POST", path: entries, body: large, status: 413, code: "payload_too_large"},
		{name: "large body", method: "POST", path: entries, body: `[` + large + `,` + large + `,` + large + `]`, status: 413, code: "payload_too_large"},
		{name: "many entries", method: "POST", path: entries, body: `[{"payload":1},{"payload":1},{"payload":1},{"payload":1}]`, status: 413, code: "too_many_entries"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, problem, header := s.do(c.method, c.path, c.body, c.headers...)
			if status != c.status || problem["code"] != c.code || problem["status"] != float64(c.status) {
				t.Errorf("got %d %v, want %d %s", status, problem, c.status, c.code)
			}
			if problem["type"] != "urn:penstock:problem:"+c.code || problem["title"] == "" || problem["detail"] == "" {
				t.Errorf("problem document lacks something: %v", problem)
			}
			if header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("media type %q", header.Get("Content-Type"))
			}
			if c.status == 405 && header.Get("Allow") != "POST" {
				t.Errorf("Allow: %q", header.Get("Allow"))
			}
		})
	}
	var n int
	if err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d entries were accepted (%v)", n, err)
	}
}

func TestFullQueueSaysHowFullItIs(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{Capacity: 2})
	s.do("POST", entries, `[{"payload": 1}, {"payload": 2}]`)
	status, problem, _ := s.do("POST", entries, `{"payload": 3}`)
	if status != 429 || problem["code"] != "queue_full" || problem["capacity"] != 2.0 || problem["depth"] != 2.0 {
		t.Errorf("got %d %v", status, problem)
	}
}

func TestFullFlowSaysHowFullItIs(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{CapacityPerFlow: 2})
	s.do("POST", entries, `[{"payload": 1, "flow": "acme"}, {"payload": 2, "flow": "acme"}]`)
	status, problem, _ := s.do("POST", entries, `{"payload": 3, "flow": "acme"}`)
	if status != 429 || problem["code"] != "queue_full" || problem["flow"] != "acme" || problem["capacity"] != 2.0 || problem["depth"] != 2.0 {
		t.Errorf("got %d %v", status, problem)
	}
	if status, answer, _ := s.do("POST", entries, `{"payload": 3, "flow": "other"}`); status != 201 {
		t.Errorf("another flow was refused: %d %v", status, answer)
	}
}

func TestPushWithoutAnInstanceIsRefused(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{})
	for _, sql := range []string{
		`SELECT penstock.register_model('flux', '{"protocol": "cog"}')`,
		`SELECT penstock.alter_queue('flux', '{"on_no_instance": "fail"}')`,
	} {
		if _, err := s.pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	status, problem, header := s.do("POST", "/v1/queues/flux/entries", `{"payload": {"prompt": "a boat"}}`)
	if status != 503 || problem["code"] != "no_instance" || header.Get("Retry-After") == "" {
		t.Errorf("got %d %v", status, problem)
	}
}

func TestEntryCanBeReadWhileItLivesAndAfterItsEnd(t *testing.T) {
	s := newServer(t, api.Config{}, invalidation.Config{})
	ctx := t.Context()
	_, pushed, _ := s.do("POST", entries, `{"payload": {"n": 1}}`)
	path := fmt.Sprintf("/v1/entries/%v", pushed["id"])
	status, living, _ := s.do("GET", path, "")
	if status != 200 || living["state"] != "pending" || living["queue"] != "work" || living["reasons"] == nil {
		t.Errorf("living: %d %v", status, living)
	}
	q, err := invalidation.Open(ctx, s.pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	const node = invalidation.NodeID(1<<62 + 1)
	if err := invalidation.Register(ctx, s.pool, invalidation.Node{ID: node, Name: "n", Application: "default", Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil || len(c.Locks) != 1 {
		t.Fatalf("claim: %v (%v)", c, err)
	}
	done := invalidation.Done(c.Locks[0], c.Locks[0].Entries[0].ID, json.RawMessage(`{"answer": 42}`), time.Second)
	done.Last = true
	if _, err := q.Settle(ctx, node, []invalidation.Ending{done}); err != nil {
		t.Fatal(err)
	}
	status, ended, _ := s.do("GET", path, "")
	if result, _ := ended["result"].(map[string]any); status != 200 || ended["state"] != "done" || result["answer"] != 42.0 ||
		ended["ran_ms"] != 1000.0 || ended["node"] != fmt.Sprint(int64(node)) {
		t.Errorf("ended: %d %v", status, ended)
	}
}

func TestReadinessNamesWhatIsMissing(t *testing.T) {
	s := newServer(t, api.Config{Checks: []api.Check{
		{Name: "good", Run: func(context.Context) error { return nil }},
	}}, invalidation.Config{})
	if status, answer, _ := s.do("GET", "/readyz", ""); status != 200 || answer["status"] != "ready" {
		t.Errorf("ready: %d %v", status, answer)
	}
	// As after a fail-over to a server that takes no writes.
	if _, err := s.pool.Exec(t.Context(), `ALTER ROLE CURRENT_USER IN DATABASE `+s.pool.Config().ConnConfig.Database+` SET default_transaction_read_only = on`); err != nil {
		t.Fatal(err)
	}
	s.pool.Reset()
	if status, problem, header := s.do("POST", entries, `{"payload": 1}`); status != 503 || problem["code"] != "unavailable" || header.Get("Retry-After") == "" {
		t.Errorf("push to a read-only database: %d %v", status, problem)
	}
	status, answer, _ := s.do("GET", "/readyz", "") // the refused push made it check again
	if checks, _ := answer["checks"].(map[string]any); status != 503 || checks["database"] != "failed" || checks["good"] != "ok" {
		t.Errorf("read-only database: %d %v", status, answer)
	}
	hangs := api.NewProbes(api.Config{Checks: []api.Check{
		{Name: "slow", Run: func(ctx context.Context) error { <-ctx.Done(); select {} }},
		{Name: "bad", Run: func(context.Context) error { return errors.New("draining") }},
	}})
	w := httptest.NewRecorder()
	hangs.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/readyz", nil))
	if w.Code != 503 || !strings.Contains(w.Body.String(), `"slow":"failed"`) || !strings.Contains(w.Body.String(), `"bad":"failed"`) {
		t.Errorf("check that hangs: %d %s", w.Code, w.Body)
	}
	if status, answer, _ := s.do("GET", "/livez", ""); status != 200 || answer["status"] != "live" {
		t.Errorf("live: %d %v", status, answer)
	}
}

func TestDatabaseThatIsAwayIsReportedAndNotExplainedToClients(t *testing.T) {
	var log bytes.Buffer
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=1")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	a := api.New(pool, api.Config{Open: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	w := httptest.NewRecorder()
	a.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "http://localhost/v1/entries/1", nil))
	if w.Code != 503 || strings.Contains(w.Body.String(), "127.0.0.1") {
		t.Errorf("got %d %s", w.Code, w.Body)
	}
	if !strings.Contains(log.String(), "request went wrong") {
		t.Errorf("log: %s", log.String())
	}
}

func TestServerLetsRequestsFinishAndThenEnds(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	arrived, goOn := make(chan struct{}), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- httpserver.Serve(ctx, listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(arrived)
			<-goOn
			fmt.Fprint(w, "finished")
		}), slog.New(slog.DiscardHandler))
	}()
	answered := make(chan string, 1)
	go func() {
		r, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+listener.Addr().String(), nil)
		if err != nil {
			answered <- err.Error()
			return
		}
		response, err := http.DefaultClient.Do(r)
		if err != nil {
			answered <- err.Error()
			return
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		answered <- string(body)
	}()
	<-arrived
	stop()
	close(goOn)
	if got := <-answered; got != "finished" {
		t.Errorf("request under way got %q", got)
	}
	if err := <-ended; err != nil {
		t.Errorf("server ended: %v", err)
	}
}
