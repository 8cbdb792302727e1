package recovery

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// loop runs the passes of a duty. The pause after a pass is the one that the pass returns: exactly,
// if it is shorter than the usual one, and else with a jitter of a fifth. A pause is at least as
// long as the pass took, so that a duty uses a slow database at most half of the time.
func loop(ctx context.Context, cfg Config, name string, pass func(context.Context) (time.Duration, error)) error {
	l := duty.Loop{Name: name, Pause: cfg.Pause, GiveUp: cfg.GiveUp, Log: cfg.Log}
	return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		next, err := pass(ctx)
		if next >= cfg.Pause {
			next = jitter(next)
		}
		return max(next, time.Since(start)), err
	})
}

// jitter moves a pause by up to a fifth either way.
func jitter(pause time.Duration) time.Duration {
	return pause - pause/5 + rand.N(2*pause/5+1)
}
