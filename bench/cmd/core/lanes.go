package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// compareLanes prints how many locks a second are claimed and finished from that many flows with two entries
// each: lane by lane, and up to a hundred lanes at a time. The two come in turns; medians.
func (b *bench) compareLanes(ctx context.Context, flows int) error {
	big := 100_000_000
	fmt.Printf("%-28s %12s %12s %8s\n", "lanes with", "one by one/s", "together/s", "ratio")
	for _, kind := range []struct {
		name  string
		keyed int // of two entries of a flow
		limit map[string]any
	}{
		{name: "no lock keys"},
		{name: "a key for every other entry", keyed: 1},
		{name: "a key for both entries", keyed: 2},
		{name: "max_units", limit: map[string]any{"max_units": big}},
		{name: "rate", limit: map[string]any{"rate": 1e8, "burst": 1e8}},
		{name: "rate per flow", limit: map[string]any{"rate": 1e8, "burst": 1e8, "per_flow": true}},
		{name: "rate per key, keys", keyed: 2, limit: map[string]any{"rate": 1e8, "burst": 1e8, "per_key": true}},
	} {
		var speeds [2][]float64
		for range b.rounds {
			for i, atOnce := range []int{1, 100} {
				q, err := b.flowing(ctx, flows, kind.keyed, kind.limit)
				if err != nil {
					return err
				}
				start := time.Now()
				locks, err := drainLanes(ctx, q, flows, atOnce)
				if err != nil {
					return err
				}
				speeds[i] = append(speeds[i], float64(locks)/time.Since(start).Seconds())
			}
		}
		slices.Sort(speeds[0])
		slices.Sort(speeds[1])
		one, together := speeds[0][b.rounds/2], speeds[1][b.rounds/2]
		fmt.Printf("%-28s %12.0f %12.0f %8.1f\n", kind.name, one, together, together/one)
	}
	return nil
}

// flowing makes a queue anew, with two entries in each flow.
func (b *bench) flowing(ctx context.Context, flows, keyed int, limit map[string]any) (*invalidation.Queue, error) {
	_ = invalidation.Drop(ctx, b.pool, "lanes", true, invalidation.By{})
	q, err := invalidation.Create(ctx, b.pool, "lanes", invalidation.Config{ResultRetention: -time.Second})
	if err != nil {
		return nil, err
	}
	if limit != nil {
		name := fmt.Sprintf("lanes_%v", limit["per_key"] == true) // a limit keeps what it is set to
		if err := operator.New(b.pool).SetLimit(ctx, name, limit, invalidation.By{Reason: "bench"}); err != nil {
			return nil, err
		}
		if err := operator.New(b.pool).UseLimit(ctx, "lanes", name, 1, invalidation.By{Reason: "bench"}); err != nil {
			return nil, err
		}
		if q, err = invalidation.Open(ctx, b.pool, "lanes"); err != nil {
			return nil, err
		}
	}
	for i := 0; i < 2*flows; i += 1000 {
		pushes := make([]invalidation.Push, min(1000, 2*flows-i))
		for j := range pushes {
			flow := (i + j) % flows
			pushes[j] = invalidation.Push{Payload: []byte(`{"n": 1}`), Flow: fmt.Sprint(flow)}
			if (i+j)/flows < keyed {
				pushes[j].LockKey = fmt.Sprint("key-", flow)
			}
		}
		if _, err := q.Push(ctx, pushes...); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// drainLanes claims from up to so many lanes at once, ends what it got, and returns how many locks that were.
func drainLanes(ctx context.Context, q *invalidation.Queue, flows, atOnce int) (locks int, err error) {
	var lanes []invalidation.ClaimLane
	for f := range flows {
		lanes = append(lanes, invalidation.ClaimLane{
			Lane: invalidation.Lane{Priority: 1, Flow: fmt.Sprint(f)}, IgnoreRowLocks: true,
		})
	}
	for id, ended := int32(1), 0; ended < 2*flows; id++ {
		if len(lanes) == 0 {
			return locks, fmt.Errorf("drained %d of %d", ended, 2*flows)
		}
		claimed, err := q.ClaimLanes(ctx, invalidation.LanesRequest{
			Node: 1, ClaimID: id, Limit: 500, Lanes: lanes[:min(atOnce, len(lanes))],
		})
		if err != nil {
			return locks, err
		}
		var endings []invalidation.Ending
		for i, c := range claimed {
			locks += len(c.Locks)
			endings = append(endings, doneAll(c.Locks)...)
			if !c.Drained {
				lanes = append(lanes, lanes[i])
			}
		}
		lanes, ended = lanes[len(claimed):], ended+len(endings)
		if _, err := q.Settle(ctx, 1, endings); err != nil {
			return locks, err
		}
	}
	return locks, nil
}
