package recovery

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// loop keeps a duty. A pause is as long as the pass asks for: exactly, if it has reason to come earlier than usual, and
// else a fifth more or less at random. A pass that took long is followed by a pause as long: a duty leaves a slow
// database half of the time.
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
