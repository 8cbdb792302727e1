package gateway

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
)

// Leases keeps the slots of the pools in step with the database. Each pool has a leaser of its own: a statement about
// one model that hangs delays no other. A request never waits for a statement of its own: it waits in its pool, and is
// dispatched when a slot comes.
type Leases struct {
	config     LeasesConfig
	holder     slot.Holder
	gateway    *Gateway
	log        *slog.Logger
	wake       chan struct{} // holds one: a comparison is asked for
	statements chan struct{} // holds one for each statement of a leaser that is under way
	failing    duty.FailingEach

	mu            sync.Mutex
	leasers       map[string]*leaser // by model
	start         func(l *leaser)    // runs a leaser in a goroutine; nil while Run does not
	granted       bool               // the gateway was told of slots that no comparison has read
	reading       bool               // a comparison reads them
	answer        time.Time          // the last statement that the database answered
	failed        bool               // it did not answer the last one about all models
	nodeLeaseEnds time.Time          // until then what is held is this gateway's, by its lease
	trusted       time.Time          // until then slots are used; zero: it was not set yet
	figures       LeaseFigures
}

// SlotStatements bounds the statements of the leasers that are under way at once. The comparison, the shares and the
// heartbeat take a connection each besides.
const SlotStatements = 4

// LeasesConfig of the Leases. The zero value works.
type LeasesConfig struct {
	NodeLease time.Duration // of the gateway's registration: 30 s
	Log       *slog.Logger

	// Tests set these.
	every   time.Duration // between give-backs and comparisons: 1 s
	timeout time.Duration // of a statement: 2 s
}

// LeaseFigures are the counters of the leases since their start.
type LeaseFigures struct {
	Leases, Granted, Returned, Lost, Preempted, Doubted int64
	Degraded                                            bool // the database does not answer
	Silent                                              time.Duration
}

// NewLeases returns the slots of a gateway's pools. node is asked for the gateway's incarnation.
func NewLeases(config LeasesConfig, g *Gateway, db postgres.DB, node func() invalidation.NodeID) *Leases {
	config.NodeLease = cmp.Or(config.NodeLease, 30*time.Second)
	config.every = cmp.Or(config.every, time.Second)
	config.timeout = cmp.Or(config.timeout, 2*time.Second)
	l := &Leases{
		config: config, holder: slot.Holder{DB: db, Node: node}, gateway: g, log: cmp.Or(config.Log, slog.Default()),
		wake: make(chan struct{}, 1), statements: make(chan struct{}, SlotStatements), leasers: map[string]*leaser{},
		answer: time.Now(),
	}
	g.leases = l
	return l
}

// gather is the time from the first request that waits to the lease, so that a burst leases at once.
const gather = time.Millisecond

// need notes that a pool wants slots, and leases some a moment later. It is called under the pool's lock. The lease
// asks other gateways for as many slots as the pool wants by then. One for the first request of a burst would bring one
// slot, and the others would wait for a second hand-over.
func (l *Leases) need(model string) {
	l.mu.Lock()
	leaser := l.leaser(model)
	known := leaser.wantsSlots
	leaser.wantsSlots = true
	l.mu.Unlock()
	if !known {
		time.AfterFunc(gather, func() { l.wakeLeaser(leaser) })
	}
}

// doubt notes that the call on a slot may still run although no client waits for it.
func (l *Leases) doubt(model string, s slot.Held, reason string) {
	l.mu.Lock()
	leaser := l.leaser(model)
	leaser.leaving.Doubt(slot.Doubt{Held: s, Reason: reason})
	l.mu.Unlock()
	l.wakeLeaser(leaser)
}

// Granted is called when slots were handed over to a gateway. It does not block.
func (l *Leases) Granted(node invalidation.NodeID) {
	if node != l.holder.Node() {
		return
	}
	l.mu.Lock()
	l.granted = true
	l.mu.Unlock()
	l.compareAgain()
}

// granting says whether slots are about to come in, so that what pools miss is not known.
func (l *Leases) granting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.granted || l.reading
}

// OfferIdle is called when another node misses slots of a model, and when slots came idle here while that holds: those
// that are not needed here are offered. It does not block.
func (l *Leases) OfferIdle(model string) {
	l.mu.Lock()
	leaser := l.leaser(model)
	leaser.offerDue = true
	l.mu.Unlock()
	l.wakeLeaser(leaser)
}

// leaser returns the leaser of a model; called with mu held.
func (l *Leases) leaser(model string) *leaser {
	known := l.leasers[model]
	if known == nil {
		known = &leaser{leases: l, model: model, wake: make(chan struct{}, 1)}
		l.leasers[model] = known
	}
	return known
}

// wakeLeaser lets a leaser do what is due. It does not block.
func (l *Leases) wakeLeaser(leaser *leaser) {
	l.mu.Lock()
	defer l.mu.Unlock()
	leaser.due = true
	switch {
	case l.start == nil: // Run begins with what is due
	case !leaser.running:
		leaser.running = true
		l.start(leaser)
	default:
		select {
		case leaser.wake <- struct{}{}:
		default:
		}
	}
}

// wakeWanting lets the leasers of all pools that want slots try again.
func (l *Leases) wakeWanting() {
	l.mu.Lock()
	var wanting []*leaser
	for _, leaser := range l.leasers {
		if leaser.wantsSlots {
			wanting = append(wanting, leaser)
		}
	}
	l.mu.Unlock()
	for _, leaser := range wanting {
		l.wakeLeaser(leaser)
	}
}

// Figures returns the counters.
func (l *Leases) Figures() LeaseFigures {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.figures
	f.Silent = time.Since(l.answer)
	f.Degraded = f.Silent > degradedAfter
	return f
}

// degradedAfter is for how long no statement was answered before the gateway says that it is degraded.
const degradedAfter = 5 * time.Second

// Run leases, gives back and compares until ctx ends; then it gives back every idle slot, and removes the gateway's
// row.
func (l *Leases) Run(ctx context.Context) error {
	var group sync.WaitGroup
	group.Go(func() { l.keepTrust(ctx) })
	group.Go(func() { l.keepShares(ctx) })
	l.mu.Lock()
	l.start = func(leaser *leaser) { group.Go(func() { leaser.run(ctx) }) }
	var due []*leaser
	for _, leaser := range l.leasers {
		if leaser.due || leaser.wantsSlots {
			due = append(due, leaser)
		}
	}
	l.mu.Unlock()
	for _, leaser := range due {
		l.wakeLeaser(leaser)
	}
	for {
		select {
		case <-ctx.Done():
		case <-l.wake:
		}
		if ctx.Err() != nil {
			break
		}
		l.compare(ctx)
	}
	l.mu.Lock()
	l.start = nil
	l.mu.Unlock()
	group.Wait()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.config.timeout)
	defer cancel()
	l.giveBackAll(last)
	l.leave(context.WithoutCancel(ctx))
	return nil
}

// keepShares compares, reads shares and sweeps by the clock until ctx ends.
func (l *Leases) keepShares(ctx context.Context) {
	ticks := time.NewTicker(l.config.every)
	defer ticks.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		l.compareAgain()
		l.tick(ctx)
		if time.Since(swept) > time.Minute {
			swept = time.Now()
			l.note(l.sweep(ctx), "sweep")
		}
	}
}

const sweepSQL = `SELECT penstock.sweep_gateways()`

// sweepMax bounds the time of a sweep, which may be planned over the tables of many queues. Meanwhile nothing is given
// back by the clock.
const sweepMax = 10 * time.Second

// sweep deletes the preemptions of entries that are gone, and the folds of gateways that are.
func (l *Leases) sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sweepMax)
	defer cancel()
	if _, err := l.holder.DB.Exec(ctx, sweepSQL); err != nil {
		return fmt.Errorf("sweep preemptions: %w", err)
	}
	return nil
}

// pool returns the pool of a model; nil: the model is no more, and its name may be that of an adapter of another one.
func (l *Leases) pool(model string) *sharedPool {
	if r := l.gateway.models.route(model); r != nil && r.model.Name == model {
		return r.pool
	}
	return nil
}

// note takes down whether the database answered a statement about all models.
func (l *Leases) note(err error, what string) bool {
	l.mu.Lock()
	l.failed = err != nil
	l.mu.Unlock()
	return l.answered(err, what, "")
}

// answered takes down whether the database answered a statement. One about a model may fail while those about others
// work; model is empty where it is about all.
func (l *Leases) answered(err error, what, model string) bool {
	var about []any
	if model != "" {
		about = []any{"model", model}
	}
	l.failing.Note(context.Background(), l.log, slog.LevelWarn, "slots: "+what, what+"\x00"+model, err, about...)
	if err != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if silent := time.Since(l.answer); silent > degradedAfter {
		l.log.Info("database answers again: slots are compared", "after", silent)
		l.compareAgain()
	}
	l.answer = time.Now()
	return true
}

// compareAgain asks for a comparison. It does not block.
func (l *Leases) compareAgain() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// extendNodeLease notes until when what is held is this gateway's, as an answer of the database said.
func (l *Leases) extendNodeLease(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if until.After(l.nodeLeaseEnds) {
		l.nodeLeaseEnds = until
	}
}
