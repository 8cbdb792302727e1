package curves

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// keys drains entries that are spread over more and more lock keys, evenly and by Zipf's law.
func (h *Harness) keys(ctx context.Context, add func(Point)) error {
	n := h.Entries * h.sizes([]int{1}, []int{5})[0]
	for _, spread := range []string{"even", "Zipf 1.1"} {
		for _, keys := range h.sizes([]int{1, 100, 10_000}, []int{1, 10, 100, 1000, 10_000, 100_000, 1_000_000}) {
			s, err := h.testbed(ctx, invalidation.Config{})
			if err != nil {
				return err
			}
			f, err := s.keyed(ctx, spread, keys, n)
			s.close()
			if err != nil {
				return err
			}
			add(Point{Series: spread, X: count(keys), Figures: f})
		}
	}
	return nil
}

func (s *testbed) keyed(ctx context.Context, spread string, keys, n int) (Figures, error) {
	entry := func(i int) invalidation.Push {
		p := solo(i)
		p.LockKey = fmt.Sprint("key-", i%keys)
		return p
	}
	if spread != "even" {
		random := rand.New(rand.NewPCG(1, 2)) // the same keys every time
		zipf := rand.NewZipf(random, 1.1, 1, uint64(keys-1))
		chosen := make([]uint64, n)
		for i := range chosen {
			chosen[i] = zipf.Uint64()
		}
		even := entry
		entry = func(i int) invalidation.Push {
			p := even(i)
			p.LockKey = fmt.Sprint("key-", chosen[i%n])
			return p
		}
	}
	took, err := s.push(ctx, n, 1000, entry)
	if err != nil {
		return nil, err
	}
	o, err := s.drain(ctx, NodeConfig{}, 1, n)
	if err != nil {
		return nil, err
	}
	return o.costs().with(Figures{pushTitle: float64(n) / took.Seconds()}), nil
}

// hotKey measures how long others wait to be picked up while a node works off a key with very many entries, and
// entries of that key still come in.
func (h *Harness) hotKey(ctx context.Context, add func(Point)) error {
	for _, size := range h.sizes([]int{0, 1000, 100_000}, []int{0, 1000, 10_000, 100_000, 1_000_000}) {
		s, err := h.testbed(ctx, invalidation.Config{})
		if err != nil {
			return err
		}
		o, err := s.besideHotKey(ctx, size)
		s.close()
		if err != nil {
			return err
		}
		add(Point{X: count(size), Figures: o.pickups()})
	}
	return nil
}

func hot(int) invalidation.Push {
	payload, _ := json.Marshal(body{Micros: 1000}) // two numbers
	return invalidation.Push{Payload: payload, LockKey: "hot"}
}

func (s *testbed) besideHotKey(ctx context.Context, size int) (outcome, error) {
	if _, err := s.push(ctx, size, 1000, hot); err != nil {
		return outcome{}, err
	}
	queue, stop := s.hinting(ctx)
	defer stop()
	c, err := s.startNodes(ctx, NodeConfig{}, 1)
	if err != nil {
		return outcome{}, err
	}
	time.Sleep(200 * time.Millisecond)

	// Meanwhile the hot key stays hot.
	pushing, end := context.WithCancel(ctx)
	var pushers sync.WaitGroup
	if size > 0 {
		pushers.Go(func() {
			for pushing.Err() == nil {
				_, _ = queue.Push(pushing, hot(0)) // the last one is cut off
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	err = s.pushTimed(ctx, queue, s.harness.sizes([]int{100}, []int{400})[0], 15*time.Millisecond)
	end()
	pushers.Wait()
	if err != nil {
		return outcome{}, err
	}
	time.Sleep(300 * time.Millisecond) // the last ones are picked up: none takes longer than a poll
	return c.stop(ctx)
}

// flows drains entries that are spread evenly over more and more flows, each a lane of its own.
func (h *Harness) flows(ctx context.Context, add func(Point)) error {
	for _, flows := range h.sizes([]int{1, 100, 1000}, []int{1, 10, 100, 1000, 10_000, 100_000}) {
		s, err := h.testbed(ctx, invalidation.Config{})
		if err != nil {
			return err
		}
		f, err := s.flowing(ctx, flows)
		s.close()
		if err != nil {
			return err
		}
		add(Point{X: count(flows), Figures: f})
	}
	return nil
}

func (s *testbed) flowing(ctx context.Context, flows int) (Figures, error) {
	flow := func(i int) string { return fmt.Sprint("flow-", i) }
	n := max(2*s.harness.Entries, flows)
	if _, err := s.push(ctx, n, 1000, func(i int) invalidation.Push {
		p := solo(i)
		p.Flow = flow(i % flows)
		return p
	}); err != nil {
		return nil, err
	}
	times, err := s.claimTimes(ctx, func() invalidation.Lane {
		return invalidation.Lane{Priority: 1, Flow: flow(rand.N(flows))} // any lane will do
	}, solo)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if _, err := invalidation.Lanes(ctx, s.pool, []int32{s.queue.ID}, 1000); err != nil {
		return nil, err
	}
	look := time.Since(start).Seconds() * 1000
	o, err := s.drain(ctx, NodeConfig{}, 1, n)
	if err != nil {
		return nil, err
	}
	return o.costs().with(times, Figures{lookTitle: look}), nil
}
