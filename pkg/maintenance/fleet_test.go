package maintenance_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// term is a fence that a test can close, as a lost election does.
type term struct {
	db   postgres.DB
	mu   sync.Mutex
	over bool
}

var errOver = errors.New("term is over")

func (f *term) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	f.mu.Lock()
	over := f.over
	f.mu.Unlock()
	if over {
		return errOver
	}
	return postgres.InTx(ctx, f.db, fn)
}

func (f *term) Hold(context.Context, pgx.Tx) error {
	return f.InTx(context.Background(), func(pgx.Tx) error { return nil })
}

// bounded is a term whose statements have two seconds, as those of election.Fence.
type bounded struct{ *term }

func (b bounded) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return b.term.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('statement_timeout', '2000', true)`); err != nil {
			return err
		}
		return fn(tx)
	})
}

// fleet is a queue and nodes that claim from it.
type fleet struct {
	t    *testing.T
	pool *pgxpool.Pool
	q    *invalidation.Queue
	next invalidation.NodeID
}

func newFleet(t *testing.T, pool *pgxpool.Pool, cfg invalidation.Config) *fleet {
	t.Helper()
	q, err := invalidation.Create(t.Context(), pool, "work", cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &fleet{t: t, pool: pool, q: q}
}

// newUsualFleet is newFleet on a database of the test, with a queue of the usual settings.
func newUsualFleet(t *testing.T) *fleet {
	t.Helper()
	pool := pgtest.NewPrepared(t, "work", func(ctx context.Context, db *pgxpool.Pool) error {
		_, err := invalidation.Create(ctx, db, "work", invalidation.Config{})
		return err
	})
	q, err := invalidation.Open(t.Context(), pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	return &fleet{t: t, pool: pool, q: q}
}

func (f *fleet) register(lease time.Duration) invalidation.NodeID {
	f.t.Helper()
	f.next++
	n := invalidation.Node{ID: f.next, Name: "node", Application: "default", Lease: lease, Queues: []int32{f.q.ID}}
	if err := invalidation.Register(f.t.Context(), f.pool, n); err != nil {
		f.t.Fatal(err)
	}
	return n.ID
}

func (f *fleet) push(n int, lockKey string) {
	f.t.Helper()
	pushes := make([]invalidation.Push, n)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: lockKey}
	}
	if _, err := f.q.Push(f.t.Context(), pushes...); err != nil {
		f.t.Fatal(err)
	}
}

// claim lets a node claim one lock and returns it, or none.
func (f *fleet) claim(node invalidation.NodeID) []*invalidation.Lock {
	f.t.Helper()
	c, err := f.q.Claim(f.t.Context(), invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil {
		f.t.Fatal(err)
	}
	return c.Locks
}

func (f *fleet) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

// hold keeps the rows that a statement locks in a transaction of another session, until letGo is called or the test ends.
func (f *fleet) hold(sql string) (letGo func()) {
	f.t.Helper()
	tx, err := f.pool.Begin(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	letGo = func() { _ = tx.Rollback(context.WithoutCancel(f.t.Context())) } // after the first call without effect
	f.t.Cleanup(letGo)
	if _, err := tx.Exec(f.t.Context(), sql); err != nil {
		f.t.Fatal(err)
	}
	return letGo
}

func (f *fleet) count(sql string, args ...any) (n int) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), sql, args...).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

// log collects what a duty reports.
type log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *log) contains(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf.Bytes(), []byte(text))
}

// run runs a duty until the test ends.
func run(t *testing.T, duty interface {
	Run(ctx context.Context) error
},
) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- duty.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("duty ended: %v", err)
		}
	})
}

// eventually waits for a condition that the duty brings about.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
