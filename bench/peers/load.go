package peers

import (
	"context"
	"math/rand/v2"
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

// ahead pushes batches until d is over and never runs more than sustainedBacklogMax ahead of handled.
// It returns how many it pushed.
func ahead(ctx context.Context, d time.Duration, handled *atomic.Int64,
	push func(ctx context.Context, first, last int) error,
) (int, error) {
	pushed := 0
	for end := time.Now().Add(d); time.Now().Before(end); {
		if pushed-int(handled.Load()) > sustainedBacklogMax-batchSize {
			time.Sleep(time.Millisecond)
			continue
		}
		if err := push(ctx, pushed, pushed+batchSize); err != nil {
			return pushed, err
		}
		pushed += batchSize
	}
	return pushed, nil
}

// pickups records when entries were pushed and when their handlers started.
type pickups struct {
	epoch   time.Time
	started []atomic.Int64 // nanoseconds since epoch
	left    atomic.Int64
	done    chan struct{}
}

func newPickups(n int) *pickups {
	p := &pickups{epoch: time.Now(), started: make([]atomic.Int64, n), done: make(chan struct{})}
	p.left.Store(int64(n))
	return p
}

// handle is called by the handler of entry i.
func (p *pickups) handle(i int) {
	p.started[i].Store(int64(time.Since(p.epoch)))
	if p.left.Add(-1) == 0 {
		close(p.done)
	}
}

// run pushes the entries apart in time and waits until all were picked up.
func (p *pickups) run(ctx context.Context, push func(ctx context.Context, i int) error) (Work, error) {
	n := len(p.started)
	called, returned := make([]time.Duration, n), make([]time.Duration, n)
	begin := time.Now()
	for i := range n {
		time.Sleep(5*time.Millisecond + rand.N(20*time.Millisecond))
		called[i] = time.Since(p.epoch)
		if err := push(ctx, i); err != nil {
			return Work{}, err
		}
		returned[i] = time.Since(p.epoch)
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return Work{}, ctx.Err()
	}
	work := Work{Entries: n, Seconds: time.Since(begin).Seconds()}
	for i := range n {
		started := time.Duration(p.started[i].Load())
		work.LatencyMicros = append(work.LatencyMicros, int(max(0, started-returned[i]).Microseconds()))
		work.FromPushMicros = append(work.FromPushMicros, int((started - called[i]).Microseconds()))
	}
	return work, nil
}
