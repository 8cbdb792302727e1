package recovery

import (
	"cmp"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// Config sets the intervals, batch sizes and thresholds of the duties. Its zero value means the
// defaults.
type Config struct {
	// Pause is the time between two passes over locks or deadlines, with a jitter of a fifth.
	// Default 500 ms.
	Pause time.Duration
	// PassLocksMax bounds the locks freed in one pass. If some are left, the next pass follows at
	// once. Default 10,000.
	PassLocksMax int
	// BatchLocksMax bounds the locks freed in one transaction. Default 1000.
	BatchLocksMax int
	// BatchEntriesMax bounds the entries promoted or expired in one transaction. Default 1000.
	BatchEntriesMax int
	// SuspendShare and SuspendNodesMin: nothing is freed while more than this share of the nodes,
	// and at least so many, have missed heartbeats together for a cause that may be outside the
	// nodes, see Suspender. Defaults 0.3 and 3.
	SuspendShare    float64
	SuspendNodesMin int
	// NodeRetention is how long the row of a dead node is kept after its lease has lapsed. Default
	// 10 minutes.
	NodeRetention time.Duration
	// AuditRetention is how long the audit is kept, in whole days, 30 at least. Zero: for ever.
	AuditRetention time.Duration
	// RetentionPause is the longest time between two passes of Retention; one that leaves rows to delete is
	// followed sooner. Default 1 minute.
	RetentionPause time.Duration
	// Brake says when pushes are refused because there is nearly no room.
	Brake BrakeConfig
	// BrakePause is the time between two passes of Brake. Default 2 s.
	BrakePause time.Duration
	// CountPause is the shortest time between two counts of a bounded queue. Default 1 s.
	CountPause time.Duration
	// SamplePause is the shortest time between two samples of the queues. Default 5 s.
	SamplePause time.Duration
	// CompactPause is the time between two passes of Compaction. Default 10 s.
	CompactPause time.Duration
	// Clock judges the database's clock for Retention, across terms. Default: one for this term.
	Clock *duty.Clock
	// GiveUp is how long the passes of a duty may fail before it returns, see duty.Loop.
	GiveUp time.Duration
	// Hint is called with a queue after entries of it became ready. It must not block. Default: no
	// call.
	Hint func(queue int32)
	// Log receives warnings and errors. Default: discarded.
	Log *slog.Logger
	// Random returns a number in [0, 1) for jitter. Default: math/rand.
	Random func() float64
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(c.Pause, 500*time.Millisecond)
	c.PassLocksMax = cmp.Or(c.PassLocksMax, 10_000)
	c.BatchLocksMax = cmp.Or(c.BatchLocksMax, 1000)
	c.BatchEntriesMax = cmp.Or(c.BatchEntriesMax, 1000)
	c.SuspendShare = cmp.Or(c.SuspendShare, 0.3)
	c.SuspendNodesMin = cmp.Or(c.SuspendNodesMin, 3)
	c.NodeRetention = cmp.Or(c.NodeRetention, 10*time.Minute)
	c.RetentionPause = cmp.Or(c.RetentionPause, time.Minute)
	c.BrakePause = cmp.Or(c.BrakePause, 2*time.Second)
	c.CountPause = cmp.Or(c.CountPause, time.Second)
	c.SamplePause = cmp.Or(c.SamplePause, 5*time.Second)
	c.CompactPause = cmp.Or(c.CompactPause, 10*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Hint == nil {
		c.Hint = func(int32) {}
	}
	if c.Clock == nil {
		c.Clock = &duty.Clock{}
	}
	if c.Random == nil {
		c.Random = rand.Float64
	}
	return c
}
