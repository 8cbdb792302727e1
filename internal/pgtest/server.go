package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/devpostgres"
)

// Own is a Postgres of one test alone, with a migrated database in it, which the test may stop and
// start. For open pools and connections this is the same as the failure of a production database.
type Own struct {
	t      testing.TB
	engine engine
	dsn    string
}

// Server starts a Postgres for this test alone, in about a second. It is stopped and deleted when the test ends.
func Server(t testing.TB) *Own {
	t.Helper()
	return ServerWith(t, nil)
}

// ServerWith is Server with further server settings, named as in postgresql.conf.
func ServerWith(t testing.TB, settings map[string]string) *Own {
	t.Helper()
	e, err := startOwn(t.Context(), settings)
	if err != nil {
		t.Fatalf("start a Postgres for this test: %v", err)
	}
	own := &Own{t: t, engine: e}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := e.Stop(ctx); err != nil {
			t.Errorf("stop the Postgres of this test: %v", err)
		}
	})
	b, err := newBackend(t.Context(), e)
	if err != nil {
		t.Fatalf("prepare the Postgres of this test: %v", err)
	}
	defer b.close(t.Context())
	if own.dsn, _, err = b.createDatabase(t.Context(), template); err != nil {
		t.Fatalf("create test database: %v", err)
	}
	return own
}

// DSN is the connection string of the migrated database. It stays the same over restarts.
func (o *Own) DSN() string { return o.dsn }

// Pool opens a pool on the migrated database; it is closed when the test ends.
func (o *Own) Pool() *pgxpool.Pool {
	o.t.Helper()
	return pool(o.t, o.dsn)
}

// Stop halts the server by sig. All its processes have ended when it returns.
func (o *Own) Stop(sig devpostgres.Signal) {
	o.t.Helper()
	if err := o.engine.Halt(o.t.Context(), sig); err != nil {
		o.t.Fatalf("stop the Postgres of this test by %s: %v", sig, err)
	}
}

// Start starts the server again and returns when it accepts connections.
func (o *Own) Start() {
	o.t.Helper()
	if err := o.engine.Resume(o.t.Context()); err != nil {
		o.t.Fatalf("start the Postgres of this test again: %v", err)
	}
}

// Restart is Stop and Start.
func (o *Own) Restart(sig devpostgres.Signal) {
	o.t.Helper()
	o.Stop(sig)
	o.Start()
}
