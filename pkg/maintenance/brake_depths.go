package maintenance

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// queueDepth is the number of entries of a queue at a time of this process's clock.
type queueDepth struct {
	entries int64
	at      time.Time
}

const (
	// countsMax is how long a pass begins counts of queues, and countMax bounds each: it reads some 10,000 entries of
	// each state at most.
	countsMax = time.Second
	countMax  = 5 * time.Second
	// sampleOld is the age, in pauses between samples, from which the brake counts a queue itself.
	sampleOld = 3
)

// update takes the depths of the queues from the newest sampling, and counts those that have an old sample or none.
func (b *Brake) update(ctx context.Context, queues []brakedQueue) {
	known := make(map[int32]queueDepth, len(queues))
	sampling := b.latest()
	for _, s := range sampling.Queues {
		known[s.QueueID] = queueDepth{s.Initial + s.Pending + s.Disabled, s.Read}
	}
	until := time.Now().Add(countsMax)
	depths := make(map[int32]queueDepth, len(queues))
	// The counts of a pass go on behind those of the last one: there may be more queues than a pass has time for.
	next := max(0, slices.IndexFunc(queues, func(q brakedQueue) bool { return q.ID > b.counted }))
	for _, q := range slices.Concat(queues[next:], queues[:next]) {
		d := known[q.ID]
		if before := b.depths[q.ID]; before.at.After(d.at) {
			d = before
		}
		if b.old(q, d.at, sampling.Took) {
			d = b.count(ctx, until, q.ID, d)
		}
		if !d.at.IsZero() {
			depths[q.ID] = d
		}
	}
	b.depths = depths
	maps.DeleteFunc(b.notBefore, func(_ int32, until time.Time) bool { return time.Now().After(until) })
}

// old tells whether the depth of a queue, known at a time, is too old. A queue that is refused for its depth does not
// wait for a sampling that is slow. Another one does, and is counted where samplings do not end: it would take entries
// without a bound.
func (b *Brake) old(q brakedQueue, at time.Time, took time.Duration) bool {
	if q.Bounded || b.cfg.Brake.QueueEntriesMax <= 0 {
		return false
	}
	if q.Held == "depth" {
		return time.Since(at) > sampleOld*b.cfg.SamplePause
	}
	if at.Before(b.began) {
		at = b.began
	}
	return time.Since(at) > sampleOld*samplePause(b.cfg, took)
}

const countBrakedSQL = `
SELECT coalesce(max(c.initial + c.pending + c.disabled), 0)
  FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c WHERE q.id = $1`

// count counts a queue, unless it was counted a moment ago: the counts of one queue take as large a share of the time
// as samplings. It begins before until, and returns the depth that is known if there is no count.
func (b *Brake) count(ctx context.Context, until time.Time, queue int32, known queueDepth) queueDepth {
	start := time.Now()
	if start.Before(b.notBefore[queue]) || start.After(until) {
		return known
	}
	counted := queueDepth{at: start}
	b.counted = queue
	counting, cancel := context.WithTimeout(ctx, countMax)
	err := b.db.QueryRow(counting, countBrakedSQL, queue).Scan(&counted.entries)
	cancel()
	b.notBefore[queue] = start.Add(time.Duration(float64(time.Since(start)) / sampleShare))
	b.report(ctx, fmt.Sprintf("depth of queue %d", queue), err)
	if err != nil {
		return known
	}
	return counted
}
