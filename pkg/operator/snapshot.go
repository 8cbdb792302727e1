package operator

import (
	"context"
	"fmt"
	"time"
)

// Snapshot is the live system at one moment, as `penstock top` shows it.
type Snapshot struct {
	At      time.Time `json:"at"` // by the database's clock
	Queues  []Queue   `json:"queues"`
	Lanes   []Lane    `json:"lanes"`
	Nodes   []Node    `json:"nodes"`
	Locks   []Lock    `json:"locks"` // the 200 oldest
	Rates   []Rate    `json:"rates"` // by queue; without samples empty in a first snapshot
	Leader  *Leader   `json:"leader,omitempty"`
	Server  Server    `json:"server"`
	Waiting int64     `json:"waiting"`

	Unmeasured int `json:"unmeasured,omitempty" doc:"Queues without a sample yet, which waiting does not count."`
}

// Rate is the entries a second inserted into and deleted from a queue's table between two samples.
// It comes from the statistics collector, so it lags by about a second; an entry that is retried
// counts in neither.
type Rate struct {
	Queue string  `json:"queue"`
	In    float64 `json:"in"`
	Out   float64 `json:"out"`
}

// Leader is the present leader, or the last one.
type Leader struct {
	Holder        string  `json:"holder"`
	Term          int64   `json:"term"`
	Live          bool    `json:"live"`
	SilentSeconds float64 `json:"silent_seconds"`
}

const leaderSQL = `
SELECT holder, term, renewed_at + lease > clock_timestamp() AS live,
       extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS silent_seconds
  FROM penstock.leader
 WHERE renewed_at IS NOT NULL
 ORDER BY renewed_at DESC
 LIMIT 1`

// Snapshot reads the live system: queues as the leader sampled them, the rest as it is. Without samples, rates are
// those since the earlier snapshot, none if that is nil.
func (d *Database) Snapshot(ctx context.Context, earlier *Snapshot) (*Snapshot, error) {
	s := &Snapshot{}
	v := &s.Server
	err := d.db.QueryRow(ctx, serverSQL).Scan(&s.At, &v.Connections, &v.MaxConnections, &v.HorizonSeconds,
		&v.NotifyUsage, &v.DeadTuples)
	if err != nil {
		return nil, fmt.Errorf("read the server's state: %w", err)
	}
	if s.Leader, err = d.Leader(ctx); err != nil {
		return nil, err
	}
	if s.Queues, err = d.Queues(ctx); err != nil {
		return nil, err
	}
	if s.Lanes, err = d.Lanes(ctx, "", 200); err != nil {
		return nil, err
	}
	if s.Nodes, err = d.NodesOfEachState(ctx, 500); err != nil {
		return nil, err
	}
	if s.Locks, err = d.Locks(ctx, LockFilter{Limit: 200}); err != nil {
		return nil, err
	}
	for _, q := range s.Queues {
		s.Waiting += q.AwaitingCompute
		if q.Unmeasured {
			s.Unmeasured++
		}
	}
	s.Rates = Rates(earlier, s)
	return s, nil
}

// Rates come from the samples; without samples from the counters of two snapshots. Counters that
// decreased were reset and give no rate.
func Rates(earlier, now *Snapshot) []Rate {
	before, seconds := map[int32]Queue{}, 0.0
	if earlier != nil {
		seconds = now.At.Sub(earlier.At).Seconds()
		for _, q := range earlier.Queues {
			before[q.QueueID] = q
		}
	}
	var found []Rate
	for _, q := range now.Queues {
		if q.InPerSecond != nil && q.OutPerSecond != nil {
			found = append(found, Rate{Queue: q.Name, In: *q.InPerSecond, Out: *q.OutPerSecond})
			continue
		}
		was, known := before[q.QueueID]
		if !known || seconds <= 0 || !countedNow(was) || !countedNow(q) || q.Accepted < was.Accepted ||
			q.Gone < was.Gone {
			continue
		}
		found = append(found, Rate{
			Queue: q.Name, In: float64(q.Accepted-was.Accepted) / seconds,
			Out: float64(q.Gone-was.Gone) / seconds,
		})
	}
	return found
}

// countedNow reports whether the counters of a queue are those of the time of the snapshot.
func countedNow(q Queue) bool { return q.SampledAt == nil && !q.Unmeasured }
