package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// compareShards prints how many entries a second are pushed to, and claimed and finished by several nodes from, a queue
// without shards and one with so many, a lane for each. The two come in turns; medians.
func (b *bench) compareShards(ctx context.Context, shards int) error {
	spread := fmt.Sprint(shards, " lanes/s")
	fmt.Printf("%6s %6s %16s %16s %8s %16s %16s %8s\n", "nodes", "claim", "push, 1 lane/s", spread, "ratio",
		"drain, 1 lane/s", spread, "ratio")
	for _, c := range []struct{ nodes, limit int }{{1, 500}, {2, 500}, {4, 500}, {2, 10}, {4, 10}} {
		var pushes, drains [2][]float64
		for range b.rounds {
			for i, lanes := range []int{1, shards} {
				_ = invalidation.Drop(ctx, b.pool, "shards", true, invalidation.By{})
				config := invalidation.Config{ResultRetention: -time.Second, Shards: lanes}
				q, err := invalidation.Create(ctx, b.pool, "shards", config)
				if err != nil {
					return err
				}
				start := time.Now()
				if err := pushPlain(ctx, q, b.n); err != nil {
					return err
				}
				pushes[i] = append(pushes[i], float64(b.n)/time.Since(start).Seconds())
				start = time.Now()
				if err := drainBy(ctx, q, b.n, lanes, c.nodes, c.limit); err != nil {
					return err
				}
				drains[i] = append(drains[i], float64(b.n)/time.Since(start).Seconds())
			}
		}
		push, drain := medians(pushes), medians(drains)
		fmt.Printf("%6d %6d %16.0f %16.0f %8.2f %16.0f %16.0f %8.2f\n", c.nodes, c.limit,
			push[0], push[1], push[1]/push[0], drain[0], drain[1], drain[1]/drain[0])
	}
	return nil
}

func medians(rates [2][]float64) (of [2]float64) {
	for i := range rates {
		slices.Sort(rates[i])
		of[i] = rates[i][len(rates[i])/2]
	}
	return of
}

// pushPlain pushes n entries without a flow from two goroutines, in lists of 100.
func pushPlain(ctx context.Context, q *invalidation.Queue, n int) error {
	return each(2, func(w int) error {
		for i := w * 100; i < n; i += 200 {
			pushes := make([]invalidation.Push, min(100, n-i))
			for j := range pushes {
				pushes[j] = invalidation.Push{Payload: json.RawMessage(`{"n": 1}`)}
			}
			if _, err := q.Push(ctx, pushes...); err != nil {
				return err
			}
		}
		return nil
	})
}

// shard is the flow of a shard, or none in a queue without shards.
func shard(n, shards int) string {
	if shards == 1 {
		return ""
	}
	return fmt.Sprint("shard-", n)
}

// drainBy claims and finishes n entries by that many nodes. Each has a goroutine that claims and one that finishes, and
// goes on to the next lane where another claimer is in one.
func drainBy(ctx context.Context, q *invalidation.Queue, n, lanes, nodes, limit int) error {
	var ended atomic.Int64
	work := func(w int) error {
		claimed := make(chan []*invalidation.Lock, 4)
		var finish sync.WaitGroup
		var failed atomic.Pointer[error]
		finish.Go(func() {
			for locks := range claimed {
				var endings []invalidation.Ending
				for _, l := range locks {
					e := invalidation.Done(l, l.Entries[0].ID, nil, 0)
					e.Last = true
					endings = append(endings, e)
				}
				if _, err := q.Settle(ctx, invalidation.NodeID(w+1), endings); err != nil {
					failed.Store(&err)
				}
				ended.Add(int64(len(locks)))
			}
		})
		marks := make([]int64, lanes)
		var failure error
		for id, at := int32(1), w*lanes/nodes; ended.Load() < int64(n) && failure == nil; id, at = id+1, at+1 {
			lane := at % lanes
			c, err := q.Claim(ctx, invalidation.ClaimRequest{
				Node: invalidation.NodeID(w + 1), ClaimID: id, From: marks[lane], Limit: limit,
				Lane: invalidation.Lane{Priority: 1, Flow: shard(lane, lanes)},
			})
			if err != nil {
				failure = err
				break
			}
			if p := failed.Load(); p != nil {
				failure = *p
			}
			marks[lane] = max(marks[lane], c.LowWater)
			switch {
			case len(c.Locks) > 0:
				claimed <- c.Locks
			case at%lanes == lanes-1: // no lane of this round had anything, or others claimed from them
				time.Sleep(time.Millisecond)
			}
		}
		close(claimed)
		finish.Wait()
		return failure
	}
	var all sync.WaitGroup
	errs := make([]error, nodes)
	for w := range nodes {
		all.Go(func() { errs[w] = work(w) })
	}
	all.Wait()
	return errors.Join(errs...)
}
