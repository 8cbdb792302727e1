package gateway

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Leases keeps the slots of the pools in step with the database: one goroutine for all pools. A request
// never waits for a statement of its own: it waits in its pool, and is dispatched when a slot comes.
type Leases struct {
	config LeasesConfig
	store  store
	pools  *Gateway
	log    *slog.Logger
	wake   chan struct{} // holds one

	mu      sync.Mutex
	hungry  map[string]bool
	asked   map[string]bool // models of which another node misses slots
	check   bool            // some slots were handed over: read which
	doubts  []doubtful
	now     map[string]*supply
	answer  time.Time // the last statement that the database answered
	failed  bool      // it did not answer the last one
	sure    time.Time // until then what is held is this gateway's, by its lease
	trusted time.Time // until then slots are used; zero: it was not set yet
	strict  bool      // slots were dropped because that time was over
	figures LeaseFigures
}

// LeasesConfig of the Leases. The zero value works.
type LeasesConfig struct {
	Lease   time.Duration // of the gateway's registration: 30 s
	Every   time.Duration // between give-backs and comparisons: 1 s
	Gather  time.Duration // from the first request that waits to the lease, so that a burst leases at once: 1 ms
	GapMin  time.Duration // between two leases of a pool: 5 ms
	GapMax  time.Duration // after leases that brought nothing: 250 ms
	GapCold time.Duration // between two while no instance is there, which keep the demand known: 1 s
	AwayMax time.Duration // slots held count that long while the database is away: 15 min
	Timeout time.Duration // of a statement: 2 s
	Log     *slog.Logger
}

// LeaseFigures are the counters of the leases since their start.
type LeaseFigures struct {
	Leases, Granted, Returned, Lost, Preempted, Doubted int64
	Degraded                                            bool // the database does not answer
	Silent                                              time.Duration
}

type doubtful struct {
	slot   SlotKey
	reason string
}

// supply is what the leases remember of a pool.
type supply struct {
	asked   time.Time     // when the last lease was sent
	gap     time.Duration // from then to the next one; it doubles while leases bring nothing
	cold    bool          // the pool had no instance at the last lease
	missed  bool          // the last lease brought too few: the database has the demand
	preempt time.Time     // no preemption before
	peak    float64       // of calls in flight, of late
}

// NewLeases returns the slots of a gateway's pools. node is asked for the gateway's incarnation.
func NewLeases(config LeasesConfig, g *Gateway, db postgres.DB, node func() invalidation.NodeID) *Leases {
	config.Lease = cmp.Or(config.Lease, 30*time.Second)
	config.Every = cmp.Or(config.Every, time.Second)
	config.Gather = cmp.Or(config.Gather, time.Millisecond)
	config.GapMin = cmp.Or(config.GapMin, 5*time.Millisecond)
	config.GapMax = cmp.Or(config.GapMax, 250*time.Millisecond)
	config.GapCold = cmp.Or(config.GapCold, time.Second)
	config.AwayMax = cmp.Or(config.AwayMax, 15*time.Minute)
	config.Timeout = cmp.Or(config.Timeout, 2*time.Second)
	l := &Leases{
		config: config, store: store{db, node}, pools: g, log: cmp.Or(config.Log, slog.Default()),
		wake: make(chan struct{}, 1), hungry: map[string]bool{}, asked: map[string]bool{}, now: map[string]*supply{},
		answer: time.Now(),
	}
	g.leases = l
	return l
}

// need notes that a pool wants slots, and leases some a moment later. It is called under the pool's lock. The lease
// asks other gateways for as many slots as the pool wants by then. One for the first request of a burst would bring one slot,
// and the others would wait for a second hand-over.
func (l *Leases) need(model string) {
	l.mu.Lock()
	known := l.hungry[model]
	l.hungry[model] = true
	l.mu.Unlock()
	if !known {
		time.AfterFunc(l.config.Gather, l.nudge)
	}
}

// doubt notes that the call on a slot may still run although no client waits for it.
func (l *Leases) doubt(s SlotKey, reason string) {
	l.mu.Lock()
	l.doubts = append(l.doubts, doubtful{s, reason})
	l.mu.Unlock()
	l.nudge()
}

// Granted is called when slots were handed over to a gateway. It does not block.
func (l *Leases) Granted(node invalidation.NodeID) {
	if node != l.store.node() {
		return
	}
	l.mu.Lock()
	l.check = true
	l.mu.Unlock()
	l.nudge()
}

// Wanted is called when another node misses slots of a model: idle ones that are not needed here are handed over. It
// does not block.
func (l *Leases) Wanted(model string) {
	l.mu.Lock()
	l.asked[model] = true
	l.mu.Unlock()
	l.nudge()
}

func (l *Leases) nudge() {
	select {
	case l.wake <- struct{}{}:
	default:
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

// Run leases, gives back and compares until ctx ends; then it gives back every idle slot.
func (l *Leases) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { l.keepTrust(ctx) })
	ticks := time.NewTicker(l.config.Every)
	defer ticks.Stop()
	swept := time.Now()
	for {
		soon := l.pass(ctx)
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.config.Timeout)
			defer cancel()
			l.giveBackAll(ctx)
			return nil
		case <-l.wake:
		case <-soon:
		case <-ticks.C:
			l.tick(ctx)
			if time.Since(swept) > time.Minute {
				swept = time.Now()
				l.note(l.store.sweep(ctx), "sweep")
			}
		}
	}
}

// pass does what is urgent: slots in doubt, slots that were handed over, leases, preemptions. The channel
// tells when the next pass is due, nil if none is.
func (l *Leases) pass(ctx context.Context) <-chan time.Time {
	l.sendDoubts(ctx)
	l.mu.Lock()
	check := l.check
	l.check = false
	names := slices.Sorted(maps.Keys(l.hungry))
	asked := slices.Sorted(maps.Keys(l.asked))
	clear(l.asked)
	l.mu.Unlock()
	if check {
		l.compare(ctx)
	}
	for _, name := range asked {
		l.handOver(ctx, name)
	}
	var next time.Time
	for _, name := range names {
		if at := l.feed(ctx, name); !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if next.IsZero() {
		return nil
	}
	return time.After(max(time.Until(next), time.Millisecond))
}

// feed leases for one pool whose requests wait. It returns when to try again, zero if no request waits. A pool without
// instances gets none: the statement records its demand, and wakes the autoscaler.
func (l *Leases) feed(ctx context.Context, model string) time.Time {
	g := l.gate(model)
	if g == nil {
		l.sated(model)
		return time.Time{}
	}
	now := time.Now()
	var want int
	var oldest time.Time
	var mode PoolMode
	var policy PoolPolicy
	var out []SlotKey
	away := l.away()
	g.do(func(now time.Time, p *Pool) {
		if away {
			p.keepOwed(now) // a slot that cannot be given back is of use here alone
		} else {
			out = p.surrender()
		}
		want, oldest, mode, policy = p.wanted(now), p.oldest(), p.mode, p.policy
	})
	if len(out) > 0 {
		l.giveBack(ctx, g, out)
	}
	s := l.supplyOf(model)
	if want == 0 {
		l.withdraw(ctx, model, s)
		l.sated(model)
		return time.Time{}
	}
	most := l.config.GapMax
	if mode == ModeCold {
		most = l.config.GapCold
		s.cold = true
	} else if s.cold {
		s.cold, s.gap, s.asked = false, 0, time.Time{} // an instance has come up
	}
	if now.Sub(s.asked) > most {
		s.gap = 0 // what was so at the last lease says little
	}
	if !now.Before(s.next(l.config.GapMin)) {
		got := l.lease(ctx, g, want)
		s.asked = now
		if got > 0 {
			s.gap = 0
		}
		want -= got
		s.missed = s.missed || want > 0
		s.gap = min(max(2*s.gap, l.config.GapMin), most)
	}
	next := s.next(l.config.GapMin)
	if due, can := preemptDue(policy, mode, oldest, s.preempt); can && want > 0 {
		if now := time.Now(); !now.Before(due) {
			l.preempt(ctx, model, want)
			s.preempt = now.Add(policy.PreemptAfter.Duration())
			due = s.preempt
		}
		if due.Before(next) {
			next = due
		}
	}
	return next
}

// next is when the next lease may be sent.
func (s *supply) next(least time.Duration) time.Time { return s.asked.Add(max(s.gap, least)) }

// withdraw tells the database that the pool misses no slots any more: until then other nodes keep back what they could
// use.
func (l *Leases) withdraw(ctx context.Context, model string, s *supply) {
	if !s.missed {
		return
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	if l.note(l.store.withdraw(bounded, model), "withdraw demand") {
		s.missed = false // otherwise the demand lapses by itself
	}
}

// preemptDue says when durable runs may be preempted for the requests that wait.
func preemptDue(p PoolPolicy, mode PoolMode, oldest, before time.Time) (due time.Time, can bool) {
	if !p.Preempt || mode != ModeQueue || oldest.IsZero() {
		return due, false
	}
	due = oldest.Add(p.PreemptAfter.Duration())
	if due.Before(before) {
		due = before
	}
	return due, true
}

func (l *Leases) sated(model string) {
	l.mu.Lock()
	delete(l.hungry, model)
	l.mu.Unlock()
	// A request that came in between has found the entry, and woken no feeder.
	if g := l.gate(model); g != nil {
		g.do(func(time.Time, *Pool) {})
	}
}

func (l *Leases) lease(ctx context.Context, g *gate, want int) int {
	start := time.Now()
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	got, err := l.store.lease(bounded, g.model, want)
	l.mu.Lock()
	l.figures.Leases++
	l.figures.Granted += int64(len(got.slots))
	l.mu.Unlock()
	if !l.note(err, "lease") {
		l.mu.Lock()
		l.check = true // the answer may have been lost
		l.mu.Unlock()
		return 0
	}
	if len(got.slots) > 0 {
		l.rely(start, got.valid)
		g.do(func(now time.Time, p *Pool) { p.Grant(now, got.slots) })
	}
	return len(got.slots)
}

func (l *Leases) preempt(ctx context.Context, model string, want int) {
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	n, err := l.store.preempt(bounded, model, want)
	if l.note(err, "preempt") && n > 0 {
		l.log.Info("durable runs preempted for online requests", "model", model, "runs", n, "waiting", want)
		l.mu.Lock()
		l.figures.Preempted += int64(n)
		l.mu.Unlock()
	}
}

func (l *Leases) gate(model string) *gate {
	for _, r := range l.pools.models.all() {
		if r.model.Name == model {
			return r.gate
		}
	}
	return nil
}

func (l *Leases) supplyOf(model string) *supply {
	s := l.now[model]
	if s == nil {
		s = &supply{}
		l.now[model] = s
	}
	return s
}

// away says whether the database did not answer the last statement.
func (l *Leases) away() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// note takes down whether the database answered.
func (l *Leases) note(err error, what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = err != nil
	if err == nil {
		if silent := time.Since(l.answer); silent > degradedAfter {
			l.log.Info("database answers again: slots are compared", "after", silent)
			l.check = true
		}
		l.answer = time.Now()
		return true
	}
	l.log.Warn("slots", "statement", what, "error", err, "degraded", time.Since(l.answer) > degradedAfter)
	return false
}

// rely notes until when what is held is this gateway's: the answer to a question sent at start said so.
func (l *Leases) rely(start time.Time, valid time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if until := start.Add(valid); until.After(l.sure) {
		l.sure = until
	}
}
