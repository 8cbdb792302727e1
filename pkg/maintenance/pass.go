package maintenance

import (
	"context"
	"fmt"
	"log/slog"
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

// failedPause is the shortest time until a pass that failed is tried again, where Config.Pause is longer.
const failedPause = time.Second

// loop is that of a duty's passes.
func (c Config) loop(name string) duty.Loop {
	return duty.Loop{
		Name: name, Pause: c.Pause, Retry: min(c.Pause, failedPause), GiveUp: c.GiveUp, Log: c.Log, Spaced: true,
	}
}

// tolerate takes note of the outcome of a step for an object, see duty.FailingEach; args name the object. It returns an
// error that ends a pass: the database is unavailable, the term is over, or ctx ended. Any other error concerns the
// rows of a statement, and would come under another leader as well: it is logged, for the pass to go on, and the
// result is nil.
func (c Config) tolerate(ctx context.Context, err error, step string, args ...any) error {
	if postgres.Unavailable(err) || ctx.Err() != nil {
		return err
	}
	c.failing.Note(ctx, c.Log, slog.LevelError, step, step+fmt.Sprint(args...), err, args...)
	return nil
}

// inTerm runs a transaction that commits only within the term. It calls Hold after fn, so that a slow statement (a drop
// that waits for readers, a count of millions) delays no take-over; a transaction of Fence.InTx holds the term from its
// beginning, and is short.
func inTerm(ctx context.Context, db postgres.DB, fence Fence, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return fence.Hold(ctx, tx)
	})
}
