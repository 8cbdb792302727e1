package postgres_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// mute is a database that never answers to the end of a transaction.
type mute struct{ postgres.DB }

func (mute) Begin(context.Context) (pgx.Tx, error) { return muteTx{}, nil }

type muteTx struct{ pgx.Tx }

func (muteTx) Commit(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func (t muteTx) Rollback(ctx context.Context) error { return t.Commit(ctx) }

func TestTransactionEndsWhereItsEndIsNeverAnswered(t *testing.T) {
	for name, result := range map[string]error{"commit": nil, "rollback": errors.New("no")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				err := postgres.InTx(context.Background(), mute{}, func(pgx.Tx) error { return result })
				if took := time.Since(start); err == nil || took > 61*time.Second {
					t.Errorf("ended after %v with %v, want an error within a minute", took, err)
				}
			})
		})
	}
}
