package api

import (
	"bufio"
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

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// forget makes the API ask the database about its tokens again, as it does five seconds after it asked last.
func forget(a *API) {
	a.tokens.mu.Lock()
	defer a.tokens.mu.Unlock()
	for key, t := range a.tokens.seen {
		t.until = time.Time{}
		a.tokens.seen[key] = t
	}
}

func TestARevokedTokenEndsItsStreamAndItsEvents(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	a := New(pool, Config{})
	server := httptest.NewServer(a)
	defer server.Close()
	secret := newToken(t, pool, operator.Grant{Name: "ci", Scopes: []string{"push", "read"}})
	begin := func(method, path string, body io.Reader, header ...string) *bufio.Reader {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, server.URL+path, body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+secret)
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		answer, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { answer.Body.Close() })
		return bufio.NewReader(answer.Body)
	}
	body, lines := io.Pipe()
	go func() { _, _ = io.WriteString(lines, "{\"payload\": 1}\n") }()
	answers := begin("POST", "/v1/queues/work/entries", body, "Content-Type", "application/x-ndjson", "Accept", "application/x-ndjson")
	if line, err := answers.ReadString('\n'); err != nil || !strings.Contains(line, `"inserted"`) {
		t.Fatalf("the first line: %s (%v)", line, err)
	}
	events := begin("GET", "/v1/entries/1/events", http.NoBody)
	if line, err := events.ReadString('\n'); err != nil || !strings.HasPrefix(line, "id:") {
		t.Fatalf("the first event: %s (%v)", line, err)
	}
	if err := a.operator.RevokeToken(t.Context(), "ci", invalidation.By{Actor: "test", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	forget(a)
	go func() { _, _ = io.WriteString(lines, "{\"payload\": 2}\n") }()
	if line, err := answers.ReadString('\n'); err != nil || !strings.Contains(line, `"unauthorized"`) || strings.Contains(line, `"inserted":2`) {
		t.Errorf("a line after the revocation: %s (%v)", line, err)
	}
	lines.Close()
	if _, err := a.operator.CancelEntry(t.Context(), 1, invalidation.By{Actor: "test", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(events); err != nil || strings.Contains(string(rest), "cancelled") {
		t.Errorf("events after the revocation: %s (%v)", rest, err)
	}
	var n int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.result`).Scan(&n); err != nil || n != 1 {
		t.Errorf("%d entries, want the first one (%v)", n, err)
	}
}

func TestReadinessCostsTheDatabaseOneQueryASecondAndTellsNoAddress(t *testing.T) {
	var runs atomic.Int32
	var log syncBuffer
	a := NewProbes(Patient(Config{Log: slog.New(slog.NewTextHandler(&log, nil)), Checks: []Check{
		{Name: "database", Run: func(context.Context) error {
			runs.Add(1)
			return errors.New("dial tcp 10.1.2.3:5432: user=penstock_owner")
		}},
		{Name: "signal", Local: true, Run: func(context.Context) error { return nil }},
	}}))
	began := time.Now()
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			w := httptest.NewRecorder()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			a.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "GET", "/readyz", nil))
			if w.Code != 503 || strings.Contains(w.Body.String(), "10.1.2.3") || !strings.Contains(w.Body.String(), `"database":"failed"`) {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	all.Wait()
	if n, took := runs.Load(), time.Since(began); n > 1+int32(took/readyKept) {
		t.Errorf("200 requests in %v ran the check %d times", took, n)
	}
	if !strings.Contains(log.String(), "10.1.2.3") {
		t.Errorf("the log does not say what failed: %s", log.String())
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestWhatDoesNotExistIsRefusedAsWhatBelongsToOthers(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine', '{"application": "a"}'), penstock.create_queue('far', '{"application": "b"}'),
		penstock.push('far', '1')`)
	a := New(w.pool, Config{})
	secret := newToken(t, w.pool, operator.Grant{Name: "limited", Scopes: []string{"admin"}, Applications: []string{"a"}})
	for far, missing := range map[string]string{
		"/v1/queues/far": "/v1/queues/none", "/v1/entries/1": "/v1/entries/4711", "/v1/entries?queue=far": "/v1/entries?queue=none",
	} {
		x, y := call(a, "GET", far, "", secret), call(a, "GET", missing, "", secret)
		if x.Code != y.Code || x.Body.String() != y.Body.String() || x.Code != 403 {
			t.Errorf("%s: %d %s\n%s: %d %s", far, x.Code, x.Body, missing, y.Code, y.Body)
		}
	}
}

func TestALimitedAdminCannotLiftItsQuotas(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine', '{"application": "a"}')`)
	a := New(w.pool, Config{})
	secret := newToken(t, w.pool, operator.Grant{Name: "limited", Scopes: []string{"admin"}, Applications: []string{"a"}})
	for _, setting := range []string{`"capacity": 1000000`, `"payload_limit": 16000000`, `"max_concurrent": null`, `"grouping": "$.x"`} {
		r := httptest.NewRequestWithContext(t.Context(), "PATCH", "/v1/queues/mine", strings.NewReader(`{"settings": {`+setting+`}, `+reason+`}`))
		r.Header.Set("Authorization", "Bearer "+secret)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("If-Match", "*")
		answer := httptest.NewRecorder()
		if a.ServeHTTP(answer, r); answer.Code != 403 {
			t.Errorf("%s: %d %s", setting, answer.Code, answer.Body)
		}
	}
}

// TestErrorsNameTheFieldAndNotTheStatement sends what texts and columns cannot hold to every field that is a text.
func TestErrorsNameTheFieldAndNotTheStatement(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	for _, c := range []struct{ method, path, body, field string }{
		{"POST", pushTo, `{"payload": 1, "lock_key": "a\u0000b"}`, "lock_key"},
		{"POST", pushTo, `[{"payload": 1}, {"payload": 1, "name": "\u0000"}]`, "name"},
		{"POST", "/v1/queues", `{"name": "a\u0000", ` + reason + `}`, "name"},
		{"POST", "/v1/queues/work/pause", `{"reason": "a\u0000"}`, "reason"},
		{"GET", "/v1/entries?queue=work&flow=a%00b", "", "flow"},
		{"GET", "/v1/audit?actor=%ff", "", "actor"},
		{"PUT", "/v1/limits/l", `{"settings": {"max_units": "\u0000"}, ` + reason + `}`, "max_units"},
		{"PUT", "/v1/limits/l", `{"settings": {"max_units": 99999999999999999999}, ` + reason + `}`, ""},
		{"POST", pushTo, `{"payload": "\u0000"}`, ""},
		{"GET", "/v1/entries/99999999999999999999", "", ""},
	} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, s.URL+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		answer, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		var p Problem
		err = json.NewDecoder(answer.Body).Decode(&p)
		answer.Body.Close()
		if err != nil || answer.StatusCode != 422 || !strings.Contains(fmt.Sprint(p.Detail, p.Errors), c.field) {
			t.Errorf("%s %s %s: %d %+v (%v)", c.method, c.path, c.body, answer.StatusCode, p, err)
		}
		for _, leak := range []string{"SQLSTATE", "ERROR:", "SELECT"} {
			if strings.Contains(fmt.Sprint(p), leak) {
				t.Errorf("%s %s: the answer has %q: %+v", c.method, c.path, leak, p)
			}
		}
	}
}

func TestNumbersAtTheirEdges(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work'), penstock.push('work', '1'), penstock.push('work', '2')`)
	for _, seconds := range []string{"1e10", "1e300", "9223372036.9", "-1", "1e400"} {
		for _, dry := range []string{"true", "false"} {
			status, answer := w.send("POST", "/v1/queues/work/operations",
				`{"verb": "delete", "filter": {"all": true, "older_than_seconds": `+seconds+`}, "dry_run": `+dry+`, `+reason+`}`)
			if status != 422 && status != 400 {
				t.Errorf("older than %s seconds, dry %s: %d %v", seconds, dry, status, answer)
			}
		}
	}
	for _, c := range [][2]string{
		{"/v1/queues/work/entries", `{"payload": 1, "priority": 40000}`},
		{"/v1/queues/work/entries", `{"payload": 1, "cost": -1}`},
		{"/v1/queues/work/entries", `{"payload": 1, "cost": 1e999}`},
		{"/v1/queues/work/operations", `{"verb": "cancel", "filter": {"all": true}, "per_second": 1e10, ` + reason + `}`},
	} {
		if status, answer := w.send("POST", c[0], c[1]); status != 400 && status != 422 {
			t.Errorf("%s %s: %d %v", c[0], c[1], status, answer)
		}
	}
}

// TestAQueryOfABatchIsOneQuery: whatever closes the parenthesis around it would run with the rights of the task nodes.
func TestAQueryOfABatchIsOneQuery(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('parts', '{"kind": "batch"}')`)
	w.exec(`CREATE TABLE victim (n integer)`)
	for query, want := range map[string]int{
		`SELECT 1) q; DROP TABLE victim; SELECT * FROM (SELECT 2`:              422,
		`SELECT 1; DROP TABLE victim`:                                          422,
		`SELECT 1) q UNION ALL SELECT to_jsonb(a), 1 FROM penstock.audit a --`: 422,
		`DELETE FROM victim RETURNING n`:                                       422,
		`SELECT n FROM victim -- all of them`:                                  201,
		`SELECT 1 AS n;`:                                                       201,
	} {
		text, _ := json.Marshal(query)
		if status, answer := w.send("POST", "/v1/queues/parts/batches", `{"name": "b", "options": {"query": `+string(text)+`}, `+reason+`}`); status != want {
			t.Errorf("%s: %d %v, want %d", query, status, answer, want)
		}
	}
}

// TestALargeHeaderIsAnswered: a client that is still sending reads the answer instead of a reset connection.
func TestALargeHeaderIsAnswered(t *testing.T) {
	listener, err := httpserver.Listen(t.Context(), httpserver.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- httpserver.Serve(ctx, listener, NewProbes(Config{}), slog.New(slog.DiscardHandler)) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\nX-Large: "+strings.Repeat("x", 1<<20)+"\r\n\r\n"); err != nil {
		t.Fatalf("the request could not be sent: %v", err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "431") {
		t.Errorf("it was answered %q (%v)", line, err)
	}
}

func TestTheRootSaysWhereToGo(t *testing.T) {
	w := newWorld(t)
	if status, answer := w.send("GET", "/", ""); status != 200 || answer["openapi"] != "/openapi.yaml" {
		t.Errorf("%d %v", status, answer)
	}
	if status, _ := w.send("GET", "/nowhere", ""); status != 404 {
		t.Errorf("another address: %d", status)
	}
}

func TestRefusalsAreLoggedWithTheTokensNameAndWithoutItsSecret(t *testing.T) {
	pool := pgtest.New(t)
	var log syncBuffer
	a := New(pool, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	secret := newToken(t, pool, operator.Grant{Name: "reader", Scopes: []string{"read"}})
	for range 50 {
		if answer := call(a, "POST", "/v1/queues", `{"name": "q", `+reason+`}`, secret); answer.Code != 403 {
			t.Fatal(answer.Code)
		}
	}
	call(a, "GET", "/v1/queues", "", operator.NewSecret())
	text := log.String()
	if !strings.Contains(text, "request refused") || !strings.Contains(text, "reader") || !strings.Contains(text, "POST /v1/queues") || strings.Contains(text, secret) {
		t.Errorf("the log has %s", text)
	}
	if n := strings.Count(text, "request refused"); n > 3*refusalsLogged {
		t.Errorf("%d lines for 51 refusals", n)
	}
}
