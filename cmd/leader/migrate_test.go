package main

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
)

func TestLeaderThatMustNotMigrateNamesWhatIsMissingAndChangesNothing(t *testing.T) {
	cfg, log := defaults(), slog.New(slog.DiscardHandler)
	cfg.Leader.Migrate = false
	empty, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.Empty(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Close()
	var old *migrations.OldError
	if err := migrate(t.Context(), cfg, empty, log); !errors.As(err, &old) || old.Missing != "00001_baseline.sql" {
		t.Errorf("on an empty database: %v, want the first migration to be missing", err)
	}
	var tables int
	if err := empty.QueryRow(t.Context(), `SELECT count(*) FROM pg_class WHERE oid = to_regclass($1)`, migrations.Table).Scan(&tables); err != nil || tables != 0 {
		t.Errorf("a look made %d tables (%v)", tables, err)
	}
	if err := prepare(t.Context(), cfg, &pools{duties: empty}, log); !errors.As(err, &old) {
		t.Errorf("it waits, or says %v", err)
	}
	cfg.Leader.Migrate = true
	if err := prepare(t.Context(), cfg, &pools{duties: empty}, log); err != nil {
		t.Errorf("migrating by a session of a leader: %v", err)
	}
	cfg.Leader.Migrate = false
	if err := migrate(t.Context(), cfg, empty, log); err != nil {
		t.Errorf("on a migrated database: %v", err)
	}
}

// The session of a pooler that has taken the lock of a migration serves others afterwards, and would keep it.
func TestALeaderBehindAPoolerMigratesPastItOrNotAtAll(t *testing.T) {
	dsn, log := pgtest.Empty(t), slog.New(slog.DiscardHandler)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, Pooled: true})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	cfg := defaults()
	cfg.Database.Pooled = true
	var old *migrations.OldError
	if err := migrate(t.Context(), cfg, pool, log); !errors.As(err, &old) {
		t.Errorf("without an address past the pooler: %v, want the first migration to be missing", err)
	}
	cfg.Database.DirectURL = dsn
	if err := migrate(t.Context(), cfg, pool, log); err != nil {
		t.Errorf("with an address past the pooler: %v", err)
	}
	if err := migrations.Check(t.Context(), pool); err != nil {
		t.Error(err)
	}
	cfg.Database.DirectURL = "postgres://127.0.0.1:1/none?connect_timeout=2"
	if err := migrate(t.Context(), cfg, pool, log); err != nil {
		t.Errorf("with nothing to migrate, and an address that does not answer: %v", err)
	}
	if _, err := pool.Exec(t.Context(), `DROP SCHEMA penstock CASCADE`); err != nil {
		t.Fatal(err)
	}
	if err := migrate(t.Context(), cfg, pool, log); err == nil {
		t.Error("without a schema a leader starts although the address does not answer")
	}
}
