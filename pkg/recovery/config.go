package recovery

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Config sets the intervals, batch sizes and thresholds of recovery. Its zero value means the
// defaults.
type Config struct {
	// Pause is the time between two passes, with a jitter of a fifth. Default 500 ms.
	Pause time.Duration
	// PassLocksMax bounds the locks freed in one pass. If some are left, the next pass follows at
	// once. Default 10,000.
	PassLocksMax int
	// SuspendShare and SuspendNodesMin: nothing is freed while more than this share of the nodes,
	// and at least so many, have missed heartbeats together for a cause that may be outside the
	// nodes, see Suspender. Defaults 0.3 and 3.
	SuspendShare    float64
	SuspendNodesMin int
	// NodeRetention is how long the row of a dead node is kept after its lease has lapsed. Default
	// 10 minutes.
	NodeRetention time.Duration
	// Hint is called with a queue, and the lanes of the locks that were freed. It must not block. Default: no
	// call.
	Hint func(queue int32, lanes []invalidation.Lane)
	// Log receives warnings and errors. Default: discarded.
	Log *slog.Logger
	// Random returns a number in [0, 1) for jitter. Default: math/rand.
	Random func() float64

	batchLocksMax int           // bounds the locks freed in one transaction; 1000, but in tests
	giveUp        time.Duration // how long passes may fail before Run returns; that of duty.Loop, but in tests
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(c.Pause, 500*time.Millisecond)
	c.PassLocksMax = cmp.Or(c.PassLocksMax, 10_000)
	c.batchLocksMax = cmp.Or(c.batchLocksMax, 1000)
	c.SuspendShare = cmp.Or(c.SuspendShare, 0.3)
	c.SuspendNodesMin = cmp.Or(c.SuspendNodesMin, 3)
	c.NodeRetention = cmp.Or(c.NodeRetention, 10*time.Minute)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Hint == nil {
		c.Hint = func(int32, []invalidation.Lane) {}
	}
	return c
}
