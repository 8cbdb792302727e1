package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// drained is what one drain took for each entry.
type drained struct{ wall, cpu time.Duration }

// lanesMax is how many lanes a drain claims from at most: a claim brings one of them.
const lanesMax = 5000

// compareLimits drains the same entries from a queue without limits and from one under limits that never
// bind, in turns, so that what else the machine does meets both. A ratio of 1 says that a limit costs
// nothing. It is the median of the rounds, of the rate and of the CPU of client and server, which others on
// the machine disturb less.
func (b *bench) compareLimits(ctx context.Context, batch int) error {
	plenty := 1 << 30
	kinds := []struct {
		name  string
		limit map[string]any
	}{
		{"max_units", map[string]any{"max_units": plenty}},
		{"max_units per flow", map[string]any{"max_units": plenty, "per_flow": true}},
		{"rate", map[string]any{"rate": 1e9, "burst": 1e9}},
		{"rate per flow", map[string]any{"rate": 1e9, "burst": 1e9, "per_flow": true}},
		{"rate per key", map[string]any{"rate": 1e9, "burst": 1e9, "per_key": true}},
	}
	conn, err := pgx.ConnectConfig(ctx, b.pool.Config().ConnConfig)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if b.meter, err = meter.New(ctx, conn); err != nil {
		return err
	}
	fmt.Printf("%-20s %10s %10s %10s %8s %14s %10s\n", "limit", "keys", "free/s", "limited/s", "ratio", "CPU us, free",
		"limited")
	for _, kind := range kinds {
		if b.only != "" && b.only != kind.name {
			continue
		}
		if err := operator.New(b.pool).SetLimit(ctx, kind.name, kind.limit,
			invalidation.By{Reason: "bench"}); err != nil {
			return err
		}
		for _, keys := range []int{1, 100, 100_000} {
			var free, limited []drained
			for range b.rounds {
				for _, turn := range []struct {
					limit string
					into  *[]drained
				}{{"", &free}, {kind.name, &limited}} {
					d, err := b.drainUnder(ctx, keys, batch, turn.limit, kind.limit["per_flow"] == true)
					if err != nil {
						return fmt.Errorf("%s at %d keys: %w", kind.name, keys, err)
					}
					*turn.into = append(*turn.into, d)
				}
			}
			wall := func(d drained) float64 { return 1 / d.wall.Seconds() }
			cpu := func(d drained) float64 { return d.cpu.Seconds() * 1e6 }
			ratios := make([]float64, b.rounds)
			for i := range ratios {
				ratios[i] = wall(limited[i]) / wall(free[i])
			}
			fmt.Printf("%-20s %10d %10.0f %10.0f %8.2f %14.1f %10.1f\n", kind.name, keys, median(free, wall),
				median(limited, wall), middle(ratios),
				median(free, cpu), median(limited, cpu))
		}
	}
	return nil
}

func median(of []drained, figure func(drained) float64) float64 {
	values := make([]float64, len(of))
	for i, d := range of {
		values[i] = figure(d)
	}
	return middle(values)
}

func middle(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// drainUnder says what it takes to drain entries spread over so many lock keys, or flows; one key is none:
// all are solo.
func (b *bench) drainUnder(ctx context.Context, keys, batch int, limit string, flows bool) (d drained, err error) {
	q, err := b.limitedQueue(ctx, limit)
	if err != nil {
		return d, err
	}
	if err := b.warmUp(ctx, q); err != nil {
		return d, err
	}
	lanes := min(keys, b.n)
	if !flows {
		lanes = 1
	}
	for i := 0; i < b.n; i += 1000 {
		pushes := make([]invalidation.Push, min(1000, b.n-i))
		for j := range pushes {
			pushes[j].Payload = json.RawMessage(`{"n": 1}`)
			if lanes > 1 {
				pushes[j].Flow = strconv.Itoa((i + j) % lanes)
			} else if keys > 1 {
				pushes[j].LockKey = fmt.Sprint("key-", (i+j)%keys)
			}
		}
		if _, err := q.Push(ctx, pushes...); err != nil {
			return d, err
		}
	}
	if _, err := b.pool.Exec(ctx, `CHECKPOINT`); err != nil {
		return d, err
	}
	before, err := b.meter.Read(ctx, "postgres")
	if err != nil {
		return d, err
	}
	start, self := time.Now(), meter.Self().CPUSeconds
	n := b.n
	if lanes == 1 {
		err = b.drainAll(ctx, q, batch, n)
	} else {
		n, err = b.drainLanes(ctx, q, batch, min(lanes, lanesMax))
	}
	if err != nil {
		return d, err
	}
	d.wall = time.Since(start) / time.Duration(n)
	after, err := b.meter.Read(ctx, "postgres")
	d.cpu = time.Duration((after.Since(before).CPUSeconds +
		meter.Self().CPUSeconds - self) * float64(time.Second) / float64(n))
	return d, err
}

func (b *bench) limitedQueue(ctx context.Context, limit string) (*invalidation.Queue, error) {
	_ = invalidation.Drop(ctx, b.pool, "bench", true, invalidation.By{})
	_, err := invalidation.Create(ctx, b.pool, "bench", invalidation.Config{ResultRetention: -time.Second})
	if err != nil {
		return nil, err
	}
	if limit != "" {
		if err := operator.New(b.pool).UseLimit(ctx, "bench", limit, 1, invalidation.By{Reason: "bench"}); err != nil {
			return nil, err
		}
	}
	return invalidation.Open(ctx, b.pool, "bench")
}

// warmUp lets connections plan their statements, which they do once for each queue.
func (b *bench) warmUp(ctx context.Context, q *invalidation.Queue) error {
	const n = 200
	for i := range n {
		p := invalidation.Push{Payload: json.RawMessage(`{"n": 1}`)}
		if i%4 == 0 {
			p.LockKey = strconv.Itoa(i)
		}
		if _, err := q.Push(ctx, p); err != nil {
			return err
		}
	}
	return b.drainAll(ctx, q, 5, n)
}

// drainAll claims and settles with two goroutines until nothing is left. A claim that finds nothing has met keys that
// the other one holds, or it in the lane.
func (b *bench) drainAll(ctx context.Context, q *invalidation.Queue, batch, n int) error {
	var left atomic.Int64
	var claims atomic.Int32
	left.Store(int64(n))
	return each(2, func(int) error {
		for left.Load() > 0 {
			n, _, err := b.turn(ctx, q, invalidation.ClaimRequest{
				ClaimID: claims.Add(1),
				Lane:    invalidation.Lane{Priority: 1}, Limit: batch,
			})
			if err != nil {
				return err
			}
			if n == 0 {
				time.Sleep(2 * time.Millisecond) // as a node does
			}
			left.Add(-int64(n))
		}
		return nil
	})
}

// drainLanes does the same for the first lanes, half of them each, and returns how many entries were in them.
func (b *bench) drainLanes(ctx context.Context, q *invalidation.Queue, batch, lanes int) (int, error) {
	var claims atomic.Int32
	var all atomic.Int64
	err := each(2, func(w int) error {
		for flow := w; flow < lanes; {
			lane := invalidation.Lane{Priority: 1, Flow: strconv.Itoa(flow)}
			n, emptied, err := b.turn(ctx, q, invalidation.ClaimRequest{
				ClaimID: claims.Add(1), Lane: lane,
				Limit: batch,
			})
			if err != nil {
				return err
			}
			all.Add(int64(n))
			if emptied {
				flow += 2
			}
		}
		return nil
	})
	return int(all.Load()), err
}

// turn claims and settles once. It returns how many entries that were, and whether they were all of the lane.
func (b *bench) turn(ctx context.Context, q *invalidation.Queue, r invalidation.ClaimRequest) (n int, emptied bool,
	err error,
) {
	r.Node = 1
	c, err := q.Claim(ctx, r)
	if err != nil {
		return 0, false, err
	}
	endings := doneAll(c.Locks)
	if len(endings) == 0 {
		return 0, c.Drained, nil
	}
	_, err = q.Settle(ctx, 1, endings)
	return len(endings), c.Drained, err
}
