package peers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// monotonic is the time of CLOCK_MONOTONIC, which has the same value in every process of the machine; Node reads it as
// process.hrtime. It fails on no Linux.
func monotonic() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return time.Duration(t.Nano())
}

// arrivals records when the entries of a pick-up reached their handlers.
type arrivals struct {
	at   []atomic.Int64 // monotonic, by entry
	left atomic.Int64
	all  chan struct{}
}

func newArrivals(n int) *arrivals {
	a := &arrivals{at: make([]atomic.Int64, n), all: make(chan struct{})}
	a.left.Store(int64(n))
	return a
}

// note is called by the handler of entry i. Of an entry that comes twice the first arrival counts.
func (a *arrivals) note(i int) {
	if a.at[i].CompareAndSwap(0, int64(monotonic())) && a.left.Add(-1) == 0 {
		close(a.all)
	}
}

// wait returns the arrivals when all entries have arrived.
func (a *arrivals) wait(ctx context.Context) ([]time.Duration, error) {
	select {
	case <-a.all:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for %d of %d entries: %w", a.left.Load(), len(a.at), context.Cause(ctx))
	}
	at := make([]time.Duration, len(a.at))
	for i := range at {
		at[i] = time.Duration(a.at[i].Load())
	}
	return at, nil
}

// pickUp pushes n entries apart in time and waits until all of them have arrived.
func pickUp(ctx context.Context, n int, push func(ctx context.Context, i int) error,
	arrived func(context.Context) ([]time.Duration, error),
) (Work, error) {
	called, returned := make([]time.Duration, n), make([]time.Duration, n)
	begin := time.Now()
	for i := range n {
		time.Sleep(5*time.Millisecond + rand.N(20*time.Millisecond))
		called[i] = monotonic()
		if err := push(ctx, i); err != nil {
			return Work{}, err
		}
		returned[i] = monotonic()
	}
	at, err := arrived(ctx)
	if err != nil {
		return Work{}, err
	}
	work := Work{Entries: n, Seconds: time.Since(begin).Seconds()}
	for i := range n {
		work.LatencyMicros = append(work.LatencyMicros, int(max(0, at[i]-returned[i]).Microseconds()))
		work.FromPushMicros = append(work.FromPushMicros, int((at[i] - called[i]).Microseconds()))
	}
	return work, nil
}
