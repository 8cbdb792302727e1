package recovery

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// loop makes passes until ctx ends, with the pause that each one asks for: exactly, if it has reason to come
// earlier than usual, and else a fifth more or less at random.
// It returns an error when passes have failed for longer than cfg.GiveUp without one that did not.
// A pass that took long is followed by a pause as long: a duty leaves a slow database half of the time.
func loop(ctx context.Context, cfg Config, duty string, pass func(context.Context) (time.Duration, error)) error {
	var failingSince time.Time
	pause := rand.N(min(cfg.Pause, startMax)) // duties that start together do not stay together
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
			cfg.Log.WarnContext(ctx, "duty went wrong; trying on", "duty", duty, "error", err)
		case time.Since(failingSince) > cfg.GiveUp:
			return fmt.Errorf("keep duty %s: failing for %v: %w", duty, time.Since(failingSince).Round(time.Second), err)
		}
		if err != nil {
			next = max(next, cfg.Pause)
		}
		if next >= cfg.Pause {
			next = jitter(next)
		}
		pause = max(next, time.Since(start))
	}
}

const startMax = 500 * time.Millisecond

// jitter moves a pause by up to a fifth either way.
func jitter(pause time.Duration) time.Duration {
	return pause - pause/5 + rand.N(2*pause/5+1)
}
