package maintenance

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// Config sets the pauses and bounds of the duties. Its zero value means the defaults.
type Config struct {
	// Pause is the longest time between two passes of Deadlines, and the shortest one after a pass of any duty that
	// failed, there 1 s at most, with a jitter of a fifth. Default 500 ms.
	Pause time.Duration
	// BatchEntriesMax bounds the entries that one transaction of Deadlines promotes, expires, cancels or fails.
	// Default 1000.
	BatchEntriesMax int
	// QueuesAtOnce is how many queues one statement, or one round trip, of Deadlines and Samples reads at most: it
	// holds locks on their tables until it ends, and all of ten thousand take longer than its bound. Default 500. On
	// a database that is slow they are fewer.
	QueuesAtOnce int
	// RetentionPause is the longest time between two passes of Retention; one that leaves rows to delete is
	// followed sooner. Default 1 minute.
	RetentionPause time.Duration
	// AuditRetention is how long the audit is kept, in whole days, 30 at least. Zero: for ever.
	AuditRetention time.Duration
	// Clock judges the database's clock for Retention and Deadlines, across terms. Default: one for this term.
	Clock *duty.Clock
	// CompactPause is the time between two passes of Compaction. Default 10 s.
	CompactPause time.Duration
	// CountPause is the shortest time between two counts of a queue by Depths. Default 1 s.
	CountPause time.Duration
	// SamplePause is the shortest time between two samples of the queues. Default 5 s.
	SamplePause time.Duration
	// Brake says when pushes are refused because there is nearly no room.
	Brake BrakeConfig
	// BrakePause is the time between two passes of Brake. Default 2 s.
	BrakePause time.Duration
	// GiveUp is how long the passes of a duty may fail before it returns, see duty.Loop.
	GiveUp time.Duration
	// Hint is called with a queue after entries of it became ready. It must not block. Default: no
	// call.
	Hint func(queue int32)
	// Log receives warnings and errors. Default: discarded.
	Log *slog.Logger

	failing *duty.FailingEach // see tolerate
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(c.Pause, 500*time.Millisecond)
	c.BatchEntriesMax = cmp.Or(c.BatchEntriesMax, 1000)
	c.QueuesAtOnce = cmp.Or(c.QueuesAtOnce, 500)
	c.RetentionPause = cmp.Or(c.RetentionPause, time.Minute)
	c.CompactPause = cmp.Or(c.CompactPause, 10*time.Second)
	c.CountPause = cmp.Or(c.CountPause, time.Second)
	c.SamplePause = cmp.Or(c.SamplePause, 5*time.Second)
	c.BrakePause = cmp.Or(c.BrakePause, 2*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	c.failing = &duty.FailingEach{}
	if c.Clock == nil {
		c.Clock = &duty.Clock{}
	}
	if c.Hint == nil {
		c.Hint = func(int32) {}
	}
	return c
}
