package recovery

import (
	"context"
	"time"

	"github.com/penstock/penstock/internal/duty"
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

// answerMax bounds the wait for what a duty reads, and for the locks that it frees. A connection may
// freeze without an error while the one that keeps the term works: without the bound no leader would
// recover locks until TCP gives up, which takes a quarter of an hour.
const answerMax = 5 * time.Second

// jitter moves a pause by up to a fifth either way; random is in [0, 1).
func jitter(pause time.Duration, random float64) time.Duration {
	return pause - pause/5 + time.Duration(random*float64(2*pause/5))
}
