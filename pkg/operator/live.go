package operator

import (
	"cmp"
	"context"
	"slices"
)

const (
	// liveRowsMax bounds the rows that LiveQueues counts in one call.
	liveRowsMax = 20_000
	// liveRowsLeast is the cost of counting an empty queue, in rows: planning its statements takes as long
	// as reading so many.
	liveRowsLeast = 1000
)

// LiveQueues returns all queues. Small ones, up to a bound on their rows together, are counted now;
// the counts of the others are those of the leader's last sample, and so are the rates of all.
func (d *Database) LiveQueues(ctx context.Context) ([]Queue, error) {
	found, err := d.Queues(ctx)
	if err != nil {
		return nil, err
	}
	names := countable(found)
	if len(names) == 0 {
		return found, nil
	}
	counted, err := d.Queues(ctx, names...)
	if err != nil {
		return nil, err
	}
	now := make(map[int32]Queue, len(counted))
	for _, q := range counted {
		now[q.QueueID] = q
	}
	for i, sampled := range found {
		if q, has := now[sampled.QueueID]; has && !q.Unmeasured {
			if sampled.InPerSecond != nil {
				q.InPerSecond, q.OutPerSecond = sampled.InPerSecond, sampled.OutPerSecond
				q.SampledAt = sampled.SampledAt
			}
			found[i] = q
		}
	}
	return found, nil
}

// countable returns the names of the sampled queues that can be counted exactly within liveRowsMax: those
// with work first, and of these the smallest.
func countable(found []Queue) []string {
	rows := func(q Queue) int64 { return liveRowsLeast + q.Initial + q.Pending + q.Disabled + q.Failed }
	small := slices.DeleteFunc(slices.Clone(found),
		func(q Queue) bool { return q.Estimated || q.SampledAt == nil })
	idle := func(q Queue) int {
		if q.Pending > 0 || q.InPerSecond != nil && *q.InPerSecond > 0 || q.OutPerSecond != nil && *q.OutPerSecond > 0 {
			return 0
		}
		return 1
	}
	slices.SortFunc(small, func(a, b Queue) int {
		return cmp.Or(cmp.Compare(idle(a), idle(b)), cmp.Compare(rows(a), rows(b)), cmp.Compare(a.Name, b.Name))
	})
	var names []string
	left := int64(liveRowsMax)
	for _, q := range small {
		if left -= rows(q); left < 0 {
			break
		}
		names = append(names, q.Name)
	}
	return names
}

// Leader returns the present leader, or the last one; nil if there has been none.
func (d *Database) Leader(ctx context.Context) (*Leader, error) {
	found, err := list[Leader](ctx, d.db, "leaders", leaderSQL)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return &found[0], nil
}
