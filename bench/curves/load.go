package curves

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The loads that axes put on a queue.

// maker makes the push of entry i.
type maker func(i int) invalidation.Push

func solo(i int) invalidation.Push {
	return invalidation.Push{Payload: json.RawMessage(fmt.Sprintf(`{"n": %d}`, i))}
}

// push pushes n entries in batches of up to 1000 from two connections, and says how long it took.
func (s *testbed) push(ctx context.Context, n, batch int, entry maker) (time.Duration, error) {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for range 2 {
		group.Go(func() error {
			for {
				first := int(next.Add(int64(batch))) - batch
				if first >= n {
					return nil
				}
				pushes := make([]invalidation.Push, min(batch, n-first))
				for i := range pushes {
					pushes[i] = entry(first + i)
				}
				if _, err := s.queue.Push(ctx, pushes...); err != nil {
					return err
				}
			}
		})
	}
	err := group.Wait()
	return time.Since(start), err
}

// pushSingles pushes n entries one call each from so many connections.
func (s *testbed) pushSingles(ctx context.Context, q *invalidation.Queue, n, conns int, entry maker) (perSecond float64,
	err error,
) {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for range conns {
		group.Go(func() error {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				if _, err := q.Push(ctx, entry(int(i))); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err = group.Wait()
	return float64(n) / time.Since(start).Seconds(), err
}

// pushTimed pushes n entries whose pick-up is measured, apart by a third to five thirds of pause.
func (s *testbed) pushTimed(ctx context.Context, q *invalidation.Queue, n int, pause time.Duration) error {
	for range n {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(float64(pause) * (1.0/3 + 4.0/3*rand.Float64()))):
		}
		payload, err := json.Marshal(body{At: time.Now().UnixNano()})
		if err != nil {
			return err
		}
		if _, err := q.Push(ctx, invalidation.Push{Payload: payload}); err != nil {
			return err
		}
	}
	return nil
}

// hinting returns the testbed's queue with hints, until stop is called.
func (s *testbed) hinting(ctx context.Context) (q *invalidation.Queue, stop func()) {
	hinter := invalidation.NewHinter(s.pool, 0)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { _ = hinter.Run(ctx); close(done) }() // it returns nil, and only when ctx has ended
	return s.queue.Hinting(hinter), func() { cancel(); <-done }
}

// claimsTimed is how many claims of 10 are timed at a point.
const claimsTimed = 500

// claimTimes times claims of 10 locks in lanes of the queue's; what was claimed is ended and as many are pushed again.
func (s *testbed) claimTimes(ctx context.Context, lane func() invalidation.Lane, again maker) (Figures, error) {
	marks := map[invalidation.Lane]int64{}
	var times []float64
	for i := range claimsTimed + 20 {
		s.claims++
		at := lane()
		start := time.Now()
		c, err := s.queue.Claim(ctx, invalidation.ClaimRequest{
			Node: 1, ClaimID: s.claims, Lane: at, From: marks[at],
			Limit: 10,
		})
		if err != nil {
			return nil, err
		}
		if i >= 20 { // the first ones warm up
			times = append(times, time.Since(start).Seconds()*1000)
		}
		marks[at] = c.LowWater
		endings := finished(c.Locks)
		if len(endings) == 0 {
			continue
		}
		if _, err := s.queue.Settle(ctx, 1, endings); err != nil {
			return nil, err
		}
		pushes := make([]invalidation.Push, len(endings))
		for j := range pushes {
			pushes[j] = again(i + j)
			pushes[j].Flow = at.Flow
		}
		if _, err := s.queue.Push(ctx, pushes...); err != nil {
			return nil, err
		}
	}
	return Figures{claim50: meter.Quantile(times, 0.5), claim99: meter.Quantile(times, 0.99)}, nil
}

// usual is the lane of entries that name neither priority nor flow.
func usual() invalidation.Lane { return invalidation.Lane{Priority: 1} }

func finished(locks []*invalidation.Lock) (endings []invalidation.Ending) {
	for _, l := range locks {
		for i := range l.Entries {
			e := invalidation.Done(l, l.Entries[i].ID, nil, 0)
			e.Last = i == len(l.Entries)-1
			endings = append(endings, e)
		}
	}
	return endings
}

// drain lets nodes handle n entries that are there, for at most the harness's time of a point.
func (s *testbed) drain(ctx context.Context, d NodeConfig, processes, n int) (outcome, error) {
	c, err := s.startNodes(ctx, d, processes)
	if err != nil {
		return outcome{}, err
	}
	if err := c.await(ctx, n, s.harness.PointTime); err != nil {
		return outcome{}, err
	}
	return c.stop(ctx)
}

// pickups lets one node pick up n entries that come one by one, with a pause between them on average.
func (s *testbed) pickups(ctx context.Context, d NodeConfig, q *invalidation.Queue, n int, pause time.Duration) (
	outcome, error,
) {
	c, err := s.startNodes(ctx, d, 1)
	if err != nil {
		return outcome{}, err
	}
	time.Sleep(200 * time.Millisecond) // the node registers and finds nothing, as one that waits
	was := int(c.handled.Load())
	if err := s.pushTimed(ctx, q, n, pause); err != nil {
		return outcome{}, err
	}
	if err := c.await(ctx, was+n, s.harness.PointTime); err != nil {
		return outcome{}, err
	}
	return c.stop(ctx)
}
