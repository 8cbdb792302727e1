package pgtest

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/devpostgres"
)

func TestOwnServerKeepsItsDataAndAddressOverRestarts(t *testing.T) {
	own := ServerWith(t, map[string]string{"work_mem": "7MB"})
	stopAndStart(t, own, own.DSN())
}

func TestContainerStandsInWhereThereAreNoBinaries(t *testing.T) {
	if os.Getenv("PENSTOCK_TEST_CONTAINER") == "" {
		t.Skip("runs a container: set PENSTOCK_TEST_CONTAINER=1")
	}
	e, err := instead(t.Context(), devpostgres.Config{Settings: map[string]string{"work_mem": "7MB"}}, &devpostgres.NotFoundError{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	stopAndStart(t, &Own{t: t, engine: e}, e.ConnString())
}

func TestErrorListsTheContainerBesideAllElse(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // no engine can answer in time
	missing := &devpostgres.NotFoundError{Attempts: []devpostgres.Attempt{{Source: "binaries on PATH", Reason: "no postgres there"}}}
	e, err := instead(ctx, devpostgres.Config{}, missing)
	if err == nil {
		_ = e.Stop(t.Context())
		t.Fatal("a container was started in no time")
	}
	var listed *devpostgres.NotFoundError
	if !errors.As(err, &listed) || len(listed.Attempts) != 2 {
		t.Fatalf("got %v, want both attempts", err)
	}
	if !strings.Contains(err.Error(), "container by testcontainers-go: ") || !strings.Contains(err.Error(), "binaries on PATH") {
		t.Errorf("got %v", err)
	}
}

func stopAndStart(t *testing.T, own *Own, dsn string) {
	t.Helper()
	for _, sig := range []devpostgres.Signal{devpostgres.Fast, devpostgres.Immediate, devpostgres.Crash} {
		conn, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), "CREATE TABLE kept_"+string(sig)+" ()"); err != nil {
			t.Fatal(err)
		}
		own.Stop(sig)
		if err := conn.Ping(t.Context()); err == nil {
			t.Errorf("a server stopped by %s answers", sig)
		}
		own.Start()
		conn, err = pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		var memory string
		if err := conn.QueryRow(t.Context(), "SELECT current_setting('work_mem') FROM kept_"+string(sig)+" RIGHT JOIN (SELECT) one ON true").Scan(&memory); err != nil {
			t.Errorf("a committed table was lost by %s: %v", sig, err)
		}
		if memory != "7MB" {
			t.Errorf("work_mem is %s", memory)
		}
		conn.Close(t.Context())
	}
}
