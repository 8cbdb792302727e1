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

// inTerm runs a transaction that commits only within the term. It calls Hold after fn, so that a slow statement (a drop
// that waits for readers, a count of millions) delays no take-over; a transaction of Fence.InTx holds the term from its
// beginning, and is short.
//
// With a clock it reads the later one of the time at the beginning, which now() was in the statements, and of the time
// after them: what was deleted as too old by a time that is not believed is not committed. Without one the time does
// not matter.
func inTerm(ctx context.Context, db postgres.DB, fence Fence, clock *duty.Clock, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		if clock != nil {
			var latest time.Time
			if err := tx.QueryRow(ctx, `SELECT greatest(now(), clock_timestamp())`).Scan(&latest); err != nil {
				return fmt.Errorf("read the clock: %w", err)
			}
			if err := clock.Check(latest); err != nil {
				return err
			}
		}
		return fence.Hold(ctx, tx)
	})
}
