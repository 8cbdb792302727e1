package curves

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/invalidation"
)

// nodes drains one queue with more and more node processes: all in one lane, and spread over 16.
func (h *Harness) nodes(ctx context.Context, add func(Point)) error {
	for _, lanes := range []int{1, 16} {
		for _, processes := range h.sizes([]int{1, 2}, []int{1, 2, 4, 8, 16}) {
			s, err := h.testbed(ctx, invalidation.Config{})
			if err != nil {
				return err
			}
			n := 5 * h.Entries
			if _, err = s.push(ctx, n, 1000, func(i int) invalidation.Push {
				p := solo(i)
				if lanes > 1 {
					p.Flow = strconv.Itoa(i % lanes)
				}
				return p
			}); err != nil {
				s.close()
				return err
			}
			o, err := s.drain(ctx, NodeConfig{}, processes, n)
			s.close()
			if err != nil {
				return err
			}
			add(Point{Series: fmt.Sprintf("%d lanes", lanes), X: strconv.Itoa(processes), Figures: o.costs()})
		}
	}
	return nil
}

// threads drains with more and more processing threads: handlers that do nothing, and such that wait for 5 ms.
func (h *Harness) threads(ctx context.Context, add func(Point)) error {
	for _, micros := range []int{0, 5000} {
		for _, threads := range h.sizes([]int{1, 16, 64}, []int{1, 4, 16, 64, 256, 1024}) {
			s, err := h.testbed(ctx, invalidation.Config{})
			if err != nil {
				return err
			}
			n := 2 * h.Entries
			if micros > 0 {
				n = min(n, threads*400) // two seconds' worth
			}
			if _, err := s.push(ctx, n, 1000, solo); err != nil {
				s.close()
				return err
			}
			o, err := s.drain(ctx, NodeConfig{Threads: threads, Micros: micros}, 1, n)
			s.close()
			if err != nil {
				return err
			}
			add(Point{
				Series: fmt.Sprintf("handler of %d ms", micros/1000), X: strconv.Itoa(threads),
				Figures: o.costs(),
			})
		}
	}
	return nil
}

// hints measures pick-up with hints and without at rising rates of pushes.
func (h *Harness) hints(ctx context.Context, add func(Point)) error {
	for _, series := range []string{"hints", "no hints"} {
		s, err := h.testbed(ctx, invalidation.Config{})
		if err != nil {
			return err
		}
		err = s.hinted(ctx, series, add)
		s.close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *testbed) hinted(ctx context.Context, series string, add func(Point)) error {
	queue, config := s.queue, NodeConfig{NoHints: true}
	if series == "hints" {
		hinting, stop := s.hinting(ctx)
		defer stop()
		queue, config = hinting, NodeConfig{}
	}
	for _, perSecond := range s.harness.sizes([]int{50}, []int{10, 50, 200, 500}) {
		n := s.harness.sizes([]int{100}, []int{min(1500, 5*perSecond+100)})[0]
		o, err := s.pickups(ctx, config, queue, n, time.Second/time.Duration(perSecond))
		if err != nil {
			return err
		}
		costs := o.costs()
		delete(costs, rateTitle) // it is that of the pushes
		add(Point{Series: series, X: strconv.Itoa(perSecond), Figures: costs.with(o.pickups())})
	}
	return nil
}

// pooler compares direct connections with such through PgBouncer in transaction mode.
func (h *Harness) pooler(ctx context.Context, add func(Point)) error {
	s, err := h.testbed(ctx, invalidation.Config{})
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.connected(ctx, "direct", s.dsn, false, add); err != nil {
		return err
	}
	bouncer, err := startPgBouncer(ctx, s)
	if err != nil {
		return err
	}
	return errors.Join(s.connected(ctx, "PgBouncer", bouncer.dsn, true, add), bouncer.stop())
}

func (s *testbed) connected(ctx context.Context, series, dsn string, pooled bool, add func(Point)) error {
	pool, err := openPool(ctx, dsn, 18, pooled)
	if err != nil {
		return err
	}
	defer pool.Close()
	queue, err := invalidation.Open(ctx, pool, "bench")
	if err != nil {
		return err
	}
	through := &testbed{harness: s.harness, dsn: dsn, pool: pool, queue: queue, claims: s.claims}
	defer func() { s.claims = through.claims }()
	n := s.harness.Entries
	perSecond, err := through.pushSingles(ctx, queue, n, 16, solo)
	if err != nil {
		return err
	}
	times, err := through.claimTimes(ctx, usual, solo)
	if err != nil {
		return err
	}
	// The meter reads through the direct pool; it waits until the pooler has let its idle connections go.
	c, err := s.startNodes(ctx, NodeConfig{DSN: dsn, Pooled: pooled, NoHints: true}, 1)
	if err != nil {
		return err
	}
	if err := c.await(ctx, n, s.harness.PointTime); err != nil {
		return err
	}
	o, err := c.stop(ctx)
	if err != nil {
		return err
	}
	picked, err := s.pickups(ctx, NodeConfig{DSN: dsn, Pooled: pooled, NoHints: true}, queue,
		s.harness.sizes([]int{50}, []int{200})[0], 15*time.Millisecond)
	if err != nil {
		return err
	}
	add(Point{X: series, Figures: o.costs().with(times, picked.pickups(), Figures{pushTitle: perSecond})})
	return nil
}

// node measures one node: what an entry takes of it, in memory too, and how endings are batched under low and
// high load.
func (h *Harness) node(ctx context.Context, add func(Point)) error {
	s, err := h.testbed(ctx, invalidation.Config{})
	if err != nil {
		return err
	}
	defer s.close()
	n := h.Entries * h.sizes([]int{1}, []int{10})[0]
	if _, err := s.push(ctx, n, 1000, solo); err != nil {
		return err
	}
	full, err := s.drain(ctx, NodeConfig{Profile: h.Profile}, 1, n)
	if err != nil {
		return err
	}
	add(Point{X: "full load", Figures: full.costs().with(full.inside())})

	for _, perSecond := range h.sizes([]int{50}, []int{10, 100, 400}) {
		queue, stop := s.hinting(ctx)
		low, err := s.pickups(ctx, NodeConfig{}, queue, h.sizes([]int{100}, []int{3*perSecond + 50})[0],
			time.Second/time.Duration(perSecond))
		stop()
		if err != nil {
			return err
		}
		add(Point{
			X:       fmt.Sprintf("%d entries a second", perSecond),
			Figures: low.costs().with(low.inside(), low.pickups()),
		})
	}
	f, err := s.inFlight(ctx)
	if err != nil {
		return err
	}
	add(Point{X: "held by handlers", Figures: f})
	return nil
}

// inside are the figures of the node's own path.
func (o outcome) inside() Figures {
	each := func(v int64) float64 { return float64(v) / float64(max(1, o.Handled)) }
	return Figures{
		allocsTitle: each(o.Mallocs), allocBTitle: each(o.AllocBytes),
		handler50: meter.Quantile(o.ClaimMillis, 0.5), handler99: meter.Quantile(o.ClaimMillis, 0.99),
		settleTitle: float64(o.Settled) / float64(max(1, o.Settles)),
	}
}

// inFlight is the memory of an entry whose handler runs: of many, less that of few.
func (s *testbed) inFlight(ctx context.Context) (Figures, error) {
	const few, many = 100, 5000
	var bytes [2]int64
	for i, n := range []int{few, many} {
		if _, err := s.push(ctx, n, 1000, solo); err != nil {
			return nil, err
		}
		o, err := s.drain(ctx, NodeConfig{Threads: many, Hold: true}, 1, n)
		if err != nil {
			return nil, err
		}
		if o.Handled != n {
			return nil, fmt.Errorf("%d of %d entries were held", o.Handled, n)
		}
		bytes[i] = o.HeldBytes
	}
	return Figures{inFlightTitle: float64(bytes[1]-bytes[0]) / (many - few)}, nil
}
