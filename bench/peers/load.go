package peers

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// The loads that every Go contender drives in the same way.

// bulk pushes n entries in batches from several connections; push writes entries first up to (not including) last.
func bulk(ctx context.Context, n int, push func(ctx context.Context, first, last int) error) (Work, error) {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for range pushers {
		group.Go(func() error {
			for {
				first := int(next.Add(batchSize)) - batchSize
				if first >= n {
					return nil
				}
				if err := push(ctx, first, min(first+batchSize, n)); err != nil {
					return err
				}
			}
		})
	}
	err := group.Wait()
	return Work{Entries: n, Seconds: time.Since(start).Seconds()}, err
}

// single pushes n entries one by one from conns goroutines and keeps the time of each call.
func single(ctx context.Context, conns, n int, push func(ctx context.Context, i int) error) (Work, error) {
	var next atomic.Int64
	micros := make([]int, n)
	group, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for range conns {
		group.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				began := time.Now()
				if err := push(ctx, i); err != nil {
					return err
				}
				micros[i] = int(time.Since(began).Microseconds())
			}
		})
	}
	err := group.Wait()
	return Work{Entries: n, Seconds: time.Since(start).Seconds(), LatencyMicros: micros}, err
}

// ahead pushes batches until d is over, and then expects what it pushed. It never runs more than sustainedBacklogMax
// ahead of what this process has handled.
func ahead(ctx context.Context, d time.Duration, tally *Tally,
	push func(ctx context.Context, first, last int) error,
) error {
	pushed := 0
	for end := time.Now().Add(d); time.Now().Before(end); {
		if pushed-tally.Handled() > sustainedBacklogMax-batchSize {
			time.Sleep(time.Millisecond)
			continue
		}
		if err := push(ctx, pushed, pushed+batchSize); err != nil {
			return err
		}
		pushed += batchSize
	}
	tally.Expect(pushed)
	return nil
}
