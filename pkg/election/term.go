package election

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Term numbers the periods of leadership. Terms grow; each election and take-over begins a new one.
type Term int64

// ErrTermOver is returned if the term is no longer the newest, or its lease has lapsed. Nothing was
// written.
var ErrTermOver = errors.New("term is over")

// Fence returns the fence for a duty's writes: transactions of db that commit only while the term
// lasts.
func (t Term) Fence(db postgres.DB) Fence { return Fence{term: t, db: db} }

// Fence runs transactions under a term.
type Fence struct {
	term Term
	db   postgres.DB
}

// Term is the term that the fence names.
func (f Fence) Term() Term { return f.term }

// holdTermSQL bounds the transaction before it locks the row of the term, because that lock delays a
// take-over. Both bounds end with the transaction, so they are safe behind a transaction pooler.
const holdTermSQL = `
SELECT set_config('statement_timeout', '2000', true) IS NOT NULL
   AND set_config('idle_in_transaction_session_timeout', '2000', true) IS NOT NULL
   AND penstock.holds_term($1)`

// InTx runs fn in a transaction that commits only within the term; otherwise it changes nothing and
// returns ErrTermOver. No statement of fn may take longer than two seconds.
func (f Fence) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, f.db, func(tx pgx.Tx) error {
		if err := f.Hold(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// Hold keeps the term from ending before tx does, which must be within two seconds. It returns
// ErrTermOver if the term is over. A transaction with longer work calls Hold last, just before its
// commit.
func (f Fence) Hold(ctx context.Context, tx pgx.Tx) error {
	var holds bool
	if err := tx.QueryRow(ctx, holdTermSQL, f.term).Scan(&holds); err != nil {
		return fmt.Errorf("hold term %d: %w", f.term, err)
	}
	if !holds {
		return fmt.Errorf("hold term %d: %w", f.term, ErrTermOver)
	}
	return nil
}
