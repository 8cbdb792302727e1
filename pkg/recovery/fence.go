package recovery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Fence runs transactions that commit only within the leader's term for which a duty was started.
type Fence interface {
	duty.Fence
	// Hold keeps the term from ending before tx does, and fails if the term is over.
	Hold(ctx context.Context, tx pgx.Tx) error
}

// termDB is a postgres.DB on which each QueryRow is a transaction that commits only within the term.
// It calls Hold after the statement, so that a slow statement (a drop that waits for readers, a
// count of millions) delays no take-over.
//
// With a clock it reads the later one of the time at the beginning, which now() was in the statement, and of the time
// after it: what was deleted as too old by a time that is not believed is not committed.
type termDB struct {
	postgres.DB
	fence Fence
	clock *duty.Clock // nil: the time does not matter
}

// QueryRow implements postgres.DB.
func (d termDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return scanner(func(dest ...any) error {
		return postgres.InTx(ctx, d.DB, func(tx pgx.Tx) error {
			if err := tx.QueryRow(ctx, sql, args...).Scan(dest...); err != nil {
				return err
			}
			if err := d.checkClock(ctx, tx); err != nil {
				return err
			}
			return d.fence.Hold(ctx, tx)
		})
	})
}

func (d termDB) checkClock(ctx context.Context, tx pgx.Tx) error {
	if d.clock == nil {
		return nil
	}
	var latest time.Time
	if err := tx.QueryRow(ctx, `SELECT greatest(now(), clock_timestamp())`).Scan(&latest); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	return d.clock.Check(latest)
}

type scanner func(dest ...any) error

// Scan implements pgx.Row.
func (s scanner) Scan(dest ...any) error { return s(dest...) }
