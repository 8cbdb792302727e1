// Package duty has what the duties of the elected leader share: the loop of their passes and when it gives up, bounds
// on the rows of a transaction and on the wait for an answer, counters, a judge of the database's clock, and what makes
// a panic an error. Duties of all programs have the count of the errors in their logs.
package duty

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// Fence runs transactions that commit only within the leader's term for which a duty was started.
type Fence interface {
	InTx(ctx context.Context, fn func(pgx.Tx) error) error
}

// Loop runs the passes of a duty.
type Loop struct {
	Name   string
	Pause  time.Duration // the usual one between two passes
	Retry  time.Duration // minimum after a failed pass; Pause if zero
	GiveUp time.Duration // how long passes may fail before Run returns, so that another leader can try; 30 s if zero
	Log    *slog.Logger  // of the duty, see Errors.Log
	// Spaced passes take at most half of the time of a database that is slow: each pause is at least as long as the
	// pass before it took. Pauses of at least Pause have a jitter of a fifth; shorter ones are exact.
	Spaced bool
	// Random returns a number in [0, 1) for the pause before the first pass and for jitter; math/rand if nil.
	Random func() float64
}

const startMax = 500 * time.Millisecond

// Run makes passes until ctx ends, each followed by the pause that it asks for. It returns an error when passes have
// failed for longer than GiveUp without one that did not. A pass that panics has failed.
func (l Loop) Run(ctx context.Context, pass func(context.Context) (time.Duration, error)) error {
	var failingSince time.Time
	var failing Failing
	if l.Random == nil {
		l.Random = rand.Float64
	}
	pause := time.Duration(l.Random() * float64(min(l.Pause, startMax))) // spreads duties that start together
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		start := time.Now()
		var next time.Duration
		err := Protect(ctx, l.Log, func() (err error) {
			next, err = pass(ctx)
			return err
		})
		if l.Spaced {
			next = l.space(next, time.Since(start))
		}
		failing.Note(ctx, l.Log, slog.LevelWarn, "pass", err)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			failingSince = time.Time{}
		case failingSince.IsZero():
			failingSince = start
		case time.Since(failingSince) > cmp.Or(l.GiveUp, 30*time.Second):
			return fmt.Errorf("run duty %s: failing for %v: %w", l.Name, time.Since(failingSince).Round(time.Second),
				err)
		}
		if pause = next; err != nil {
			pause = max(next, cmp.Or(l.Retry, l.Pause))
		}
	}
}

// space returns the pause after a pass of a spaced loop that asked for one and took so long.
func (l Loop) space(pause, took time.Duration) time.Duration {
	if pause >= l.Pause {
		pause += time.Duration((2*l.Random() - 1) * float64(pause/5))
	}
	return max(pause, took)
}
