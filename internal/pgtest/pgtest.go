package pgtest

import (
	"context"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// cleanupTimeout bounds what happens after a test, when its own context is gone. It is for what hangs: on a machine
// that is busy with other things, the checkpoint of a DROP DATABASE alone can take many seconds.
const cleanupTimeout = 3 * time.Minute

// New returns a pool on a fresh migrated database, which is dropped when the test ends.
func New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return pool(t, DSN(t))
}

// DSN returns the connection string of a fresh migrated database, which is dropped when the test ends.
// Connections that are open then are cut.
func DSN(t testing.TB) string {
	t.Helper()
	return clone(t, template)
}

// Empty returns the connection string of a fresh database without any schema: for tests of the migrations themselves.
func Empty(t testing.TB) string {
	t.Helper()
	return clone(t, "template0")
}

func clone(t testing.TB, from string) string {
	t.Helper()
	ctx := t.Context()
	b, err := sharedBackend()
	if err != nil {
		t.Fatalf("get a Postgres for tests: %v", err)
	}
	dsn, drop, err := b.createDatabase(ctx, from)
	if err != nil {
		t.Fatalf("create test database: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := drop(ctx); err != nil {
			t.Errorf("drop test database: %v", err)
		}
	})
	return withPatience(dsn)
}

// withPatience is dsn with a time for a connection that is far above that of the programs, 10 s: beside the rest of a
// check, which has a higher priority, a new session of the server may take longer to begin.
func withPatience(dsn string) string {
	const parameter, seconds = "connect_timeout", "60"
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " " + parameter + "=" + seconds
	}
	query := u.Query()
	query.Set(parameter, seconds)
	u.RawQuery = query.Encode()
	return u.String()
}

// pool opens a pool large enough for tests that hold many connections at once.
func pool(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatalf("open test database: %v", err)
	}
	config.MaxConns = 32
	p, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatalf("open test database: %v", err)
	}
	t.Cleanup(func() { closePool(t, p) })
	return p
}

// closePool reports a connection that a test kept, for which Close alone would wait for ever.
func closePool(t testing.TB, p *pgxpool.Pool) {
	t.Helper()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		p.Close()
	}()
	select {
	case <-closed:
	case <-time.After(cleanupTimeout / 3):
		t.Errorf("close test pool: %d connections were never released", p.Stat().AcquiredConns())
	}
}
