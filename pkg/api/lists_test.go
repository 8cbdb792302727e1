package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// slowFailures is a database whose lists of failures hold their connections until ended is closed.
type slowFailures struct {
	*pgxpool.Pool
	begun chan struct{}
	ended chan struct{}
}

// newSlowFailures makes one with the queue work, whose pool has so many connections.
func newSlowFailures(t *testing.T, conns int32) *slowFailures {
	t.Helper()
	pool, err := postgres.Open(t.Context(), Pool(postgres.Config{DSN: pgtest.DSN(t), MaxConns: conns}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	return &slowFailures{pool, make(chan struct{}, 100), make(chan struct{})}
}

func (s *slowFailures) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "penstock.failure") {
		conn, err := s.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		s.begun <- struct{}{}
		select {
		case <-s.ended:
		case <-ctx.Done():
		}
		conn.Release()
		return s.Pool.Query(ctx, "SELECT 1 WHERE false")
	}
	return s.Pool.Query(ctx, sql, args...)
}

// A filter without an index reads a queue to its end. As many such lists as clients ask for leave connections to
// pushes and to the probe.
func TestListsLeaveConnectionsToPushesAndProbes(t *testing.T) {
	db := newSlowFailures(t, listsMax+1)
	a := New(db, Config{Open: true, Timeout: time.Minute})
	a.lists.wait = time.Millisecond
	const local = "http://localhost"
	var lists sync.WaitGroup
	t.Cleanup(lists.Wait)
	t.Cleanup(sync.OnceFunc(func() { close(db.ended) }))
	for range 2 * listsMax {
		lists.Go(func() { call(a, "GET", local+"/v1/failures?queue=work", "", "") })
	}
	for n := range listsMax {
		select {
		case <-db.begun:
		case <-time.After(time.Minute):
			t.Fatalf("%d of %d lists have begun", n, listsMax)
		}
	}
	for _, c := range []struct{ method, path, body string }{
		{"GET", "/v1/failures?queue=work", ""},
		{"GET", "/v1/entries?queue=work&flow=nobody", ""},
		{"GET", "/v1/queues/work/causes", ""},
		{"POST", "/v1/queues/work/operations", `{"verb": "cancel", "filter": {"flow": "nobody"}, "reason": "test", "dry_run": true}`},
	} {
		w := call(a, c.method, local+c.path, c.body, "")
		var p Problem
		_ = json.Unmarshal(w.Body.Bytes(), &p) // one that is no JSON has no code
		if w.Code != http.StatusServiceUnavailable || p.Code != "busy" || w.Header().Get("Retry-After") == "" {
			t.Errorf("%s %s beside as many lists as may be: %d %s", c.method, c.path, w.Code, w.Body)
		}
	}
	if w := call(a, "POST", local+pushTo, `{"payload": 1}`, ""); w.Code != http.StatusCreated {
		t.Errorf("push beside slow lists: %d %s", w.Code, w.Body)
	}
	if w := call(a, "GET", local+"/readyz", "", ""); w.Code != http.StatusOK {
		t.Errorf("the probe beside slow lists: %d %s", w.Code, w.Body)
	}
}

// One model, limit and node are read by their keys: one behind as many as a list has is there too.
func TestOneIsFoundBehindThoseOfAList(t *testing.T) {
	w := newWorld(t)
	w.exec(fmt.Sprintf(`INSERT INTO penstock.model (name, config)
	                    SELECT coalesce('a' || nullif(n, 0), 'last'), '{}' FROM generate_series(0, %d) n`, operator.PageMax))
	w.exec(fmt.Sprintf(`INSERT INTO penstock."limit" (name, max_units)
	                    SELECT coalesce('a' || nullif(n, 0), 'last'), 1 FROM generate_series(0, %d) n`, operator.PageMax))
	w.exec(fmt.Sprintf(`INSERT INTO penstock.node (id, name, application)
	                    SELECT n, coalesce('a' || nullif(n, 1), 'last'), 'default' FROM generate_series(1, %d) n`, operator.PageMax+1))
	for _, path := range []string{"/v1/models/last", "/v1/limits/last", "/v1/nodes/1"} {
		if answer := call(w.api, "GET", "http://localhost"+path, "", ""); answer.Code != http.StatusOK {
			t.Errorf("GET %s: %d %s", path, answer.Code, answer.Body)
		}
	}
}
