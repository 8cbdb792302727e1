package recovery

import (
	"context"

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
type termDB struct {
	postgres.DB
	fence Fence
}

// QueryRow implements postgres.DB.
func (d termDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return scanner(func(dest ...any) error {
		return postgres.InTx(ctx, d.DB, func(tx pgx.Tx) error {
			if err := tx.QueryRow(ctx, sql, args...).Scan(dest...); err != nil {
				return err
			}
			return d.fence.Hold(ctx, tx)
		})
	})
}

type scanner func(dest ...any) error

// Scan implements pgx.Row.
func (s scanner) Scan(dest ...any) error { return s(dest...) }
