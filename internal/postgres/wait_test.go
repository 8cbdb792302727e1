package postgres_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

func TestStartWaitsForADatabaseThatIsAwayAndForNothingElse(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	log, tries := slog.New(slog.DiscardHandler), 0
	wait := func(ctx context.Context, answers ...error) error {
		tries = 0
		return postgres.Wait(ctx, pool, log, func() error {
			tries++
			return answers[tries-1]
		})
	}
	away := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	if err := wait(t.Context(), away, away, nil); err != nil || tries != 3 {
		t.Errorf("database that comes: %v after %d tries", err, tries)
	}
	wrong := &pgconn.PgError{Code: "28P01"}
	if err := wait(t.Context(), away, wrong); !errors.Is(err, wrong) || tries != 2 {
		t.Errorf("wrong password: %v after %d tries", err, tries)
	}
	if err := wait(t.Context(), away, refusal(t)); err == nil || tries != 2 {
		t.Errorf("a role that the server does not let in: %v after %d tries", err, tries)
	}
	settings := &pgconn.PgError{Severity: "FATAL", Code: "08P01", Message: "unsupported startup parameter: jit"}
	if err := wait(t.Context(), away, settings, nil); !errors.Is(err, postgres.ErrPooler) || tries != 2 {
		t.Errorf("a pooler that takes no settings of sessions: %v after %d tries", err, tries)
	}
	queued := &pgconn.PgError{Severity: "FATAL", Code: "08P01", Message: "query_wait_timeout"}
	if err := wait(t.Context(), queued, nil); err != nil || tries != 2 {
		t.Errorf("a pooler that is busy: %v after %d tries", err, tries)
	}
	for _, code := range []string{"40001", "40P01", "55P03", "57014"} {
		if err := wait(t.Context(), &pgconn.PgError{Code: code}, nil); err != nil || tries != 2 {
			t.Errorf("SQLSTATE %s, which passes: %v after %d tries", code, err, tries)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := wait(ended, away); err != nil {
		t.Errorf("after a signal: %v", err)
	}
}
