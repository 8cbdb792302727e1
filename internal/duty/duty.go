// Package duty runs the periodic passes of the elected leader's duties.
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
	Pause  time.Duration // minimum after a failed pass
	GiveUp time.Duration // how long passes may fail before Run returns, so that another leader can try; 30 s if zero
	Log    *slog.Logger
	// Random returns a number in [0, 1) for the pause before the first pass; math/rand if nil.
	Random func() float64
}

const startMax = 500 * time.Millisecond

// Run makes passes until ctx ends, each followed by the pause that it asks for. It returns an error when passes have
// failed for longer than GiveUp without one that did not.
func (l Loop) Run(ctx context.Context, pass func(context.Context) (time.Duration, error)) error {
	var failingSince time.Time
	random := l.Random
	if random == nil {
		random = rand.Float64
	}
	pause := time.Duration(random() * float64(min(l.Pause, startMax))) // spreads duties that start together
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		start := time.Now()
		next, err := pass(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			failingSince = time.Time{}
		case failingSince.IsZero():
			failingSince = start
			l.Log.WarnContext(ctx, "pass of a duty failed; trying again", "duty", l.Name, "error", err)
		case time.Since(failingSince) > cmp.Or(l.GiveUp, 30*time.Second):
			return fmt.Errorf("run duty %s: failing for %v: %w", l.Name, time.Since(failingSince).Round(time.Second),
				err)
		}
		if pause = next; err != nil {
			pause = max(next, l.Pause)
		}
	}
}
