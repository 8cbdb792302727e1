package inference

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/worker"
)

// awayDB is a database that answers no statement.
type awayDB struct{ postgres.DB }

var errAway = errors.New("the database is away")

func (awayDB) Begin(context.Context) (pgx.Tx, error) { return nil, errAway }

func (awayDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errAway
}

func (awayDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return noRows{}, errAway }

func (awayDB) QueryRow(context.Context, string, ...any) pgx.Row { return noRow{} }

type noRows struct{ pgx.Rows }

func (noRows) Close()     {}
func (noRows) Err() error { return errAway }
func (noRows) Next() bool { return false }

// Nodes and gateways claim probes, and read the registry, each second.
func TestADatabaseThatIsAwayIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		registry := NewRegistry(awayDB{}, worker.Config{}, time.Second, log)
		prober := newProber(tuning{probeEvery: 5 * time.Second}, awayDB{}, registry, log)
		for _, run := range []func(context.Context) error{registry.Run, prober.Run} {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
			if lines := strings.Count(text.String(), "\n"); lines == 0 || lines > 3 {
				t.Errorf("%d lines in 30 s: %s", lines, text.String())
			}
			text.Reset()
			ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
		}
	})
}
