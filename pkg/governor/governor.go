package governor

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"sync"
	"time"
)

// Source measures the node. Machine is the implementation outside tests.
type Source interface {
	// Sample measures now; its At is set by the caller.
	Sample(ctx context.Context) (Measurement, error)
}

// Governor keeps the last readings and the declared needs of running entries. All its
// methods but Run are short and read no file; they may be called from any goroutine.
type Governor struct {
	config Config
	source Source
	log    *slog.Logger

	mu      sync.Mutex
	sample  Measurement
	sampled ledger // needs of the entries that ran when sample was taken
	running ledger
	state   Gates
	needs   map[string]Need
	refused map[string]refused
}

// ledger is a sum of declared needs in whole units, so that it is exact after any number of takes
// and releases.
type ledger struct {
	microcores  int64
	memoryBytes int64
}

func (l ledger) need() Need {
	return Need{CPU: float64(l.microcores) / 1e6, MemoryBytes: l.memoryBytes}
}

// New returns a governor that refuses everything until Run has taken its first reading.
func New(c Config, source Source, log *slog.Logger) (*Governor, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Governor{
		config: c.withDefaults(), source: source, log: log,
		needs: map[string]Need{}, refused: map[string]refused{},
	}, nil
}

// Run takes readings until ctx ends. The first of several failed readings is logged;
// the old readings are used until they are stale.
func (g *Governor) Run(ctx context.Context) error {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	failing := false
	for {
		err := g.read(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && !failing {
			g.log.Error("governor cannot measure the node", "error", err)
		} else if err == nil && failing {
			g.log.Info("governor measures the node again")
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (g *Governor) read(ctx context.Context) error {
	sample, err := g.source.Sample(ctx)
	if err != nil {
		return fmt.Errorf("sample CPU and memory: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	sample.At = time.Now()
	g.sample, g.sampled = sample, g.running
	g.state = g.state.Step(g.config, g.readings(0), sample.At)
	return nil
}

// CPUMost is how many cores an entry may need at most, as the setting needs of queues.
const CPUMost = 1e6

// Declare sets the need of an entry of the queue. Running entries keep the need with which they
// were taken.
func (g *Governor) Declare(queue string, n Need) error {
	if n.MemoryBytes < 0 || n.Threads < 0 || !(n.CPU >= 0) || n.CPU > CPUMost {
		return fmt.Errorf("declare need of queue %s: %+v: want values from zero up, and at most %.0f cores", queue, n,
			CPUMost)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.needs[queue] = n
	return nil
}

// Keep forgets the needs of all queues but these. Running entries keep the need with which they were taken.
func (g *Governor) Keep(queues map[string]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	maps.DeleteFunc(g.needs, func(queue string, _ Need) bool { return !queues[queue] })
}

// Hold is the need that one running entry of a queue has taken.
type Hold struct {
	microcores  int64
	memoryBytes int64
}

// Take takes the needs of up to want entries of the queue, as many as the admission allows:
// Allow is at most want, and each of these entries must be released once, when it
// finishes or when the claim did not return it. free is the number of idle processing threads.
func (g *Governor) Take(queue string, free, want int) (Admission, Hold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	need := g.needs[queue]
	v := g.decide(need, free)
	if v.Allow == 0 {
		g.refused[queue] = refused{time.Now(), v.Reasons}
		return v, Hold{}
	}
	delete(g.refused, queue)
	v.Allow = min(v.Allow, max(want, 0))
	hold := Hold{int64(math.Ceil(need.CPU * 1e6)), need.MemoryBytes}
	g.add(hold, v.Allow)
	return v, hold
}

// Release gives back the needs of n entries.
func (g *Governor) Release(h Hold, n int) {
	if h == (Hold{}) || n == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.add(h, -n)
}

func (g *Governor) add(h Hold, n int) {
	g.running.microcores += int64(n) * h.microcores
	g.running.memoryBytes += int64(n) * h.memoryBytes
}

func (g *Governor) decide(need Need, free int) (v Admission) {
	v, g.state = Decide(g.config, g.state, g.readings(free), need, time.Now())
	return v
}

func (g *Governor) readings(free int) Readings {
	return Readings{Measurement: g.sample, Sampled: g.sampled.need(), Running: g.running.need(), FreeThreads: free}
}
