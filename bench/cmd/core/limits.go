package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// compareLimits drains the same entries from a queue without limits and from one under limits that never bind, in turns,
// so that what else the machine does meets both. A ratio of 1 says that a limit costs nothing.
func (b *bench) compareLimits(ctx context.Context, batch int) error {
	plenty := 1 << 30
	kinds := []struct {
		name  string
		limit invalidation.Limit
	}{
		{"max_units", invalidation.Limit{MaxUnits: &plenty}},
		{"rate", invalidation.Limit{Rate: 1e9, Burst: 1e9}},
		{"rate per key", invalidation.Limit{Rate: 1e9, Burst: 1e9, PerKey: true}},
	}
	fmt.Printf("%-14s %10s %14s %14s %8s\n", "limit", "lock keys", "free/s", "limited/s", "ratio")
	for _, kind := range kinds {
		if err := invalidation.SetLimit(ctx, b.pool, kind.name, kind.limit); err != nil {
			return err
		}
		for _, keys := range []int{1, 100, 100_000} {
			took := [2]time.Duration{time.Hour, time.Hour} // the best of its rounds: what disturbs only ever adds
			for round := range 10 {
				limit := ""
				if round%2 == 1 {
					limit = kind.name
				}
				d, err := b.drainUnder(ctx, keys, batch, limit)
				if err != nil {
					return fmt.Errorf("%s at %d keys: %w", kind.name, keys, err)
				}
				took[round%2] = min(took[round%2], d)
			}
			rate := func(d time.Duration) float64 { return float64(b.n) / d.Seconds() }
			fmt.Printf("%-14s %10d %14.0f %14.0f %8.3f\n", kind.name, keys, rate(took[0]), rate(took[1]), rate(took[1])/rate(took[0]))
		}
	}
	return nil
}

// drainUnder says how long it takes to drain b.n entries spread over so many lock keys; one key is none: all are solo.
func (b *bench) drainUnder(ctx context.Context, keys, batch int, limit string) (time.Duration, error) {
	_ = invalidation.Drop(ctx, b.pool, "bench", true, invalidation.By{})
	_, err := invalidation.Create(ctx, b.pool, "bench", invalidation.Config{ResultRetention: -time.Second})
	if err != nil {
		return 0, err
	}
	if limit != "" {
		if err := invalidation.UseLimit(ctx, b.pool, "bench", limit, 1); err != nil {
			return 0, err
		}
	}
	q, err := invalidation.Open(ctx, b.pool, "bench")
	if err != nil {
		return 0, err
	}
	for i := 0; i < b.n; i += 1000 {
		pushes := make([]invalidation.Push, min(1000, b.n-i))
		for j := range pushes {
			pushes[j].Payload = json.RawMessage(`{"n": 1}`)
			if keys > 1 {
				pushes[j].LockKey = fmt.Sprint("key-", (i+j)%keys)
			}
		}
		if _, err := q.Push(ctx, pushes...); err != nil {
			return 0, err
		}
	}
	if _, err := b.pool.Exec(ctx, `CHECKPOINT`); err != nil {
		return 0, err
	}
	start := time.Now()
	err = b.drainAll(ctx, q, batch)
	return time.Since(start), err
}

// drainAll claims and settles with two goroutines until nothing is left. A claim that finds nothing has met keys that
// the other one holds, or it in the lane.
func (b *bench) drainAll(ctx context.Context, q *invalidation.Queue, batch int) error {
	var left atomic.Int64
	var claims atomic.Int32
	left.Store(int64(b.n))
	return each(2, func(int) error {
		for left.Load() > 0 {
			c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: 1, ClaimID: claims.Add(1), Lane: invalidation.Lane{Priority: 1}, Limit: batch})
			if err != nil {
				return err
			}
			var endings []invalidation.Ending
			for _, l := range c.Locks {
				for i := range l.Entries {
					e := invalidation.Done(l, l.Entries[i].ID, nil, 0)
					e.Last = i == len(l.Entries)-1
					endings = append(endings, e)
				}
			}
			if len(endings) == 0 {
				time.Sleep(200 * time.Microsecond)
				continue
			}
			if _, err := q.Settle(ctx, 1, endings); err != nil {
				return err
			}
			left.Add(-int64(len(endings)))
		}
		return nil
	})
}
