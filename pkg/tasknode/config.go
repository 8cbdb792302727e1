package tasknode

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Config says how a node works. A zero field means its default.
type Config struct {
	Name        string // for people, in lists and logs, such as host name and process id; empty: none
	Application string // whose queues the node serves: "default"
	// processing threads: 16 for each CPU, since most of them wait for a worker; one more runs urgent jobs
	Threads int
	// how many threads the waiting work needs now; the node grows to that number and keeps them;
	// nil: Threads
	ThreadsFor        func() int
	SchedulingThreads int           // 2
	Lease             time.Duration // 10 s, at least LeaseMin: after a silence of this length others run its entries
	Beat              time.Duration // 2 s between heartbeats
	Poll              time.Duration // 250 ms between polls for work while no hint comes; jittered
	Grace             time.Duration // 30 s for running entries to finish in a drain; negative: none
	Log               *slog.Logger

	// Gates say how many more entries the node may take, beside its permits: the resource governor, model slots.
	// All of them must agree.
	Gates []Gate
	// Ranker orders the lanes that have work. If nil, the node makes and runs a fairness.Ranker of its own.
	Ranker Ranker
	// Observer is told of claims and runs as they happen; may be nil.
	Observer Observer
	// Tracer makes a span of each claim, run and ending; nil: none.
	Tracer trace.Tracer
	// Affinity says which lanes are preferred; nil: none.
	Affinity Affinity
	// Queues is called with the queues that the node serves, each time when it has read them; may be nil.
	Queues func([]*invalidation.Queue)
	// Status returns more that the node reports with each heartbeat, for people to read; nil: nothing.
	Status func() map[string]any
	// Random returns a number in [0, 1) for jitter; math/rand if nil.
	Random func() float64
}

// Gate decides whether this node may take more of a queue's entries.
type Gate interface {
	// Take asks for up to want entries of a queue, for which the node has permits, and takes as many
	// as it allows. Each taken entry is given back once by calling release, when its run has ended or
	// never began.
	Take(queue string, want int) (allow int, release func(n int))
}

// Observer is told of claims, refusals and runs, for metrics. Its methods are called by all
// threads, on the way of every entry.
type Observer interface {
	// Claimed tells of a claim: how many locks it brought, how long it took, and whether the queue's limits
	// left no room.
	Claimed(queue string, locks int, took time.Duration, limited bool)
	// Refused tells that nothing was claimed from a queue, since the node had no free processing thread ("threads"), or
	// the queue's max_concurrent_per_node is reached ("queue_limit"). Gates know their own refusals.
	Refused(queue, reason string)
	// Ran tells of the run of an entry: how long it had waited since it was accepted, how long it ran, which is its
	// part of a run of several entries, and with what error. A snooze is none.
	Ran(queue string, waited, ran time.Duration, err error)
}

type noObserver struct{}

func (noObserver) Claimed(string, int, time.Duration, bool)        {}
func (noObserver) Refused(string, string)                          {}
func (noObserver) Ran(string, time.Duration, time.Duration, error) {}

// LeaseMin is the shortest lease of a node with this time between heartbeats: two of them may be lost, or come late.
func LeaseMin(beat time.Duration) time.Duration { return 3 * beat }

func (c Config) check() error {
	if least := LeaseMin(c.Beat); c.Lease < least {
		return fmt.Errorf("node %q: Config.Lease is %s: want three times Config.Beat, %s, or more", c.Name,
			c.Lease, least)
	}
	return nil
}

func (c Config) withDefaults() Config {
	c.Threads = positiveOr(c.Threads, 16*runtime.GOMAXPROCS(0))
	c.SchedulingThreads = positiveOr(c.SchedulingThreads, 2)
	c.Lease = positiveOr(c.Lease, 10*time.Second)
	c.Beat = positiveOr(c.Beat, 2*time.Second)
	c.Poll = positiveOr(c.Poll, 250*time.Millisecond)
	c.Grace = max(0, cmp.Or(c.Grace, 30*time.Second))
	c.Application = cmp.Or(c.Application, "default")
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Observer == nil {
		c.Observer = noObserver{}
	}
	if c.Random == nil {
		c.Random = rand.Float64
	}
	return c
}

func positiveOr[T int | time.Duration](v, otherwise T) T {
	if v > 0 {
		return v
	}
	return otherwise
}
