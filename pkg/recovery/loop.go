package recovery

import (
	"context"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// loop runs the passes of a duty. The pause after a pass is the one that the pass returns: exactly,
// if it is shorter than the usual one, and else with a jitter of a fifth. A pause is at least as
// long as the pass took, so that a duty uses a slow database at most half of the time.
func loop(ctx context.Context, cfg Config, name string, pass func(context.Context) (time.Duration, error)) error {
	l := duty.Loop{Name: name, Pause: cfg.Pause, GiveUp: cfg.GiveUp, Log: cfg.Log, Random: cfg.Random}
	return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		next, err := pass(ctx)
		if next >= cfg.Pause {
			next = jitter(next, cfg.Random())
		}
		return max(next, time.Since(start)), err
	})
}

// general reports whether an error does not concern particular rows: the database is unavailable or the term is over.
// An error that the server raised for a statement concerns the rows of that statement.
func general(err error) bool { return postgres.Code(err) == "" || postgres.Unavailable(err) }

// tolerate returns an error that ends a pass: a general one, or one that came as ctx ended. Any other would come under
// another leader as well: it logs that one, for the pass to go on, and returns nil.
func (c Config) tolerate(ctx context.Context, err error, message string, args ...any) error {
	if err == nil || general(err) || ctx.Err() != nil {
		return err
	}
	c.Log.ErrorContext(ctx, message, append(args, "error", err)...) //nolint:sloglint // a constant of each caller
	return nil
}

// answerMax bounds the wait for what a duty reads. A connection may freeze without an error while the one that keeps
// the term works: without the bound no leader would do the duty until TCP gives up, which takes a quarter of an hour.
const answerMax = 5 * time.Second

// answerBound bounds the wait for answers of one kind, readings or transactions, that a duty needs, in proportion to
// the lease. On a frozen connection the whole wait is lost, and recovery suspends itself after half a lease without an
// answer. On a database that is slow the bound doubles with each answer that does not come in time, and follows those
// that come.
type answerBound struct {
	first, now time.Duration // now is never less than first
}

const (
	answerBoundMin = 500 * time.Millisecond
	answerBoundMax = 10 * time.Second
)

// forLease sets the lease of the nodes. With a sixth of it, a wait that was in vain, the pause after it and the next
// answer take less than half a lease.
func (b *answerBound) forLease(lease time.Duration) {
	first := min(max(answerBoundMin, lease/6), answerMax)
	if b.now == b.first { // no answer was late: the bound is that of the lease before
		b.now = first
	}
	b.first, b.now = first, max(b.now, first)
}

// context is a context for a transaction or a reading of so many rows; end must be called with the result.
func (b *answerBound) context(ctx context.Context, rows int) (bounded context.Context, end func(error)) {
	start := time.Now()
	bounded, cancel := context.WithTimeout(ctx, b.now+time.Duration(rows)*2*time.Millisecond)
	return bounded, func(err error) {
		switch {
		case err == nil:
			b.now = min(max(b.first, 2*time.Since(start)), answerBoundMax)
		case bounded.Err() != nil && ctx.Err() == nil:
			b.now = min(2*b.now, answerBoundMax)
		}
		cancel()
	}
}

// jitter moves a pause by up to a fifth either way; random is in [0, 1).
func jitter(pause time.Duration, random float64) time.Duration {
	return pause - pause/5 + time.Duration(random*float64(2*pause/5))
}
