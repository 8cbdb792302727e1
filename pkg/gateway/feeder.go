package gateway

import (
	"context"
	"time"
)

// feeder leases and gives back the slots of one model. Its goroutine runs while there is something to do.
type feeder struct {
	leases *Leases
	model  string
	wake   chan struct{} // holds one: something is due

	// Under the lock of the leases.
	running bool
	due     bool
	hungry  bool // requests of the pool wait for slots, or slots are to be given back
	asked   bool // another node misses slots of the model
	anew    bool // slots were handed over: others have some to give
	doubts  []doubtful
	back    []SlotKey // out of the pool already, to be given back, some of them once more

	// Of the goroutine.
	failed time.Time // when the database did not answer the last statement; zero: it did
	supply supply
}

type doubtful struct {
	slot   SlotKey
	reason string
}

// supply is what a feeder remembers of its pool.
type supply struct {
	asked   time.Time     // when the last lease was sent
	gap     time.Duration // from then to the next one; it doubles while leases bring nothing
	cold    bool          // the pool had no instance at the last lease
	missed  bool          // the last lease brought too few: the database has the demand
	preempt time.Time     // no preemption before
	awaited time.Time     // since when a lease waits for a comparison; zero: none does
}

// parted has the slots that pools have dropped, and that a comparison must not bring back: since when the database
// knows it, zero while it has not been told. A slot that comes again has another token.
type parted map[SlotKey]time.Time

func (p parted) add(slots ...SlotKey) {
	for _, s := range slots {
		p[s] = time.Time{}
	}
}

// told notes that the database knows of slots.
func (p parted) told(slots ...SlotKey) {
	for _, s := range slots {
		p[s] = time.Now()
	}
}

// forget drops slots that are in their pools again.
func (p parted) forget(slots ...SlotKey) {
	for _, s := range slots {
		delete(p, s)
	}
}

// without returns those of some slots that no pool has dropped.
func (p parted) without(slots []SlotKey) (rest []SlotKey) {
	for _, s := range slots {
		if _, gone := p[s]; !gone {
			rest = append(rest, s)
		}
	}
	return rest
}

// since drops what the database knew before a comparison that begins now.
func (p parted) since(now time.Time) {
	for s, at := range p {
		if !at.IsZero() && at.Before(now) {
			delete(p, s)
		}
	}
}

// run does what is due until nothing is, or ctx ends.
func (f *feeder) run(ctx context.Context) {
	l := f.leases
	for {
		next := f.pass(ctx)
		l.mu.Lock()
		if ctx.Err() != nil || !f.due && next.IsZero() {
			f.running = false
			l.mu.Unlock()
			return
		}
		due := f.due
		l.mu.Unlock()
		if due {
			continue
		}
		var soon <-chan time.Time
		if !next.IsZero() {
			soon = time.After(max(time.Until(next), time.Millisecond))
		}
		select {
		case <-ctx.Done():
		case <-f.wake:
		case <-soon:
		}
	}
}

// pass does what is due: slots in doubt, give-backs, hand-overs, leases, preemptions. It returns when the next lease is
// due, zero if none is.
func (f *feeder) pass(ctx context.Context) time.Time {
	l := f.leases
	f.sendDoubts(ctx)
	away := f.away()
	l.mu.Lock()
	hungry, asked := f.hungry, f.asked
	f.due, f.asked = false, false
	if f.anew {
		f.anew, f.supply.gap = false, 0
	}
	var back []SlotKey
	if !away { // else the leases would wait for it each time
		back, f.back = f.back, nil
	}
	l.mu.Unlock()
	f.giveBack(ctx, back)
	if asked {
		f.handOver(ctx)
	}
	if !hungry {
		return time.Time{}
	}
	return f.feed(ctx)
}

// ask sends a statement of the feeder, with a bound on its time.
func (f *feeder) ask(ctx context.Context, what string, statement func(ctx context.Context) error) bool {
	l := f.leases
	select {
	case l.talks <- struct{}{}:
		defer func() { <-l.talks }()
	case <-ctx.Done():
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	err := statement(bounded)
	f.failed = time.Time{}
	if err != nil {
		f.failed = time.Now()
	}
	return l.answered(err, what)
}

// away says whether the database did not answer the last statement about all models, or just now that of the feeder.
func (f *feeder) away() bool {
	f.leases.mu.Lock()
	defer f.leases.mu.Unlock()
	return f.leases.failed || !f.failed.IsZero() && time.Since(f.failed) < f.leases.config.Timeout
}

// feed leases for one pool whose requests wait. It returns when to try again, zero if no request waits. A pool without
// instances gets none: the statement records its demand, and wakes the autoscaler.
func (f *feeder) feed(ctx context.Context) time.Time {
	l, s := f.leases, &f.supply
	pool := l.pool(f.model)
	if pool == nil {
		f.sated(nil)
		return time.Time{}
	}
	now := time.Now()
	var want int
	var oldest time.Time
	var mode PoolMode
	var policy PoolPolicy
	var out []SlotKey
	var limits limited
	away := f.away()
	pool.do(func(now time.Time, p *Pool) {
		if away {
			p.keepOwed(now) // a slot that cannot be given back is of use here alone
		} else {
			out = l.part(p.surrender())
		}
		want, oldest, mode, policy = p.wanted(now), p.oldest(), p.mode, p.policy
		limits = p.limited(now)
	})
	f.giveBack(ctx, out)
	if want == 0 {
		s.awaited = time.Time{}
		f.withdraw(ctx)
		f.sated(pool)
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
	due := preemptDue(policy, mode, oldest, s.preempt)
	if !now.Before(s.next(l.config.GapMin, oldest, due)) {
		if s.awaits(now, l.granting(), l.config.GapTold) {
			return now.Add(l.config.GapMin)
		}
		got := f.lease(ctx, pool, want, limits)
		s.asked = now
		if got > 0 {
			s.gap = 0
		}
		if want -= got; want > 0 {
			s.missed = true
			s.gap = min(max(2*s.gap, l.config.GapTold), most)
		}
	}
	if now := time.Now(); want > 0 && !due.IsZero() && !now.Before(due) {
		f.preempt(ctx, want)
		s.preempt = now.Add(max(policy.PreemptAfter.Duration(), preemptGap))
		due = s.preempt
	}
	next := s.next(l.config.GapMin, oldest, due)
	if want > 0 && !due.IsZero() && due.Before(next) {
		return due
	}
	return next
}

// preemptLead is how long before the first preemption for the requests that wait a lease is sent: runs are ended only
// for slots that no node had to give just before, and without a statement in between.
const preemptLead = 15 * time.Millisecond

// preemptGap is the least time between two orders of preemption for a pool, whatever preempt_after is: the runs that
// one ends need some time to leave their slots.
const preemptGap = 25 * time.Millisecond

// next is when the next lease may be sent. due is when durable runs may be preempted for requests that wait since
// oldest, zero if they may not. A lease from before oldest has not asked for these requests.
func (s *supply) next(least time.Duration, oldest, due time.Time) time.Time {
	at := s.asked.Add(max(s.gap, least))
	early := due.Add(-preemptLead)
	if early.Before(oldest) {
		early = oldest
	}
	switch {
	case due.IsZero() || !due.After(s.preempt): // or it is not the first preemption
	case s.asked.Before(early):
		if early.Before(at) {
			at = early
		}
		if soonest := s.asked.Add(least); at.Before(soonest) {
			at = soonest
		}
	case at.Before(due.Add(least)):
		at = due.Add(least)
	}
	return at
}

// awaits says whether a lease waits for a comparison, by which slots are about to come in. It does so for a moment at
// most: hand-overs of other models may follow one another without a pause.
func (s *supply) awaits(now time.Time, granting bool, most time.Duration) bool {
	switch {
	case granting && s.awaited.IsZero():
		s.awaited = now
	case !granting || now.Sub(s.awaited) >= most:
		s.awaited = time.Time{}
		return false
	}
	return true
}

// withdraw tells the database that the pool misses no slots any more: until then other nodes keep back what they could
// use.
func (f *feeder) withdraw(ctx context.Context) {
	withdraw := func(ctx context.Context) error { return f.leases.store.withdraw(ctx, f.model) }
	if f.supply.missed && f.ask(ctx, "withdraw demand", withdraw) {
		f.supply.missed = false // otherwise the demand lapses by itself
	}
}

// preemptDue is when durable runs may be preempted for the requests that wait, zero if they may not.
func preemptDue(p PoolPolicy, mode PoolMode, oldest, before time.Time) time.Time {
	if !p.Preempt || mode != ModeQueue || oldest.IsZero() {
		return time.Time{}
	}
	due := oldest.Add(p.PreemptAfter.Duration())
	if due.Before(before) {
		return before
	}
	return due
}

// sated notes that the pool wants no slots.
func (f *feeder) sated(pool *sharedPool) {
	f.leases.mu.Lock()
	f.hungry = false
	f.leases.mu.Unlock()
	// A request that came in between has found the mark, and woken no feeder.
	if pool != nil {
		pool.do(func(time.Time, *Pool) {})
	}
}

func (f *feeder) lease(ctx context.Context, pool *sharedPool, want int, limits limited) int {
	l := f.leases
	start := time.Now()
	var got grant
	answered := f.ask(ctx, "lease", func(ctx context.Context) (err error) {
		got, err = l.store.lease(ctx, f.model, want, limits)
		return err
	})
	l.mu.Lock()
	l.figures.Leases++
	l.figures.Granted += int64(len(got.slots))
	l.mu.Unlock()
	if !answered {
		l.compareAgain() // the answer may have been lost
		return 0
	}
	if len(got.slots) > 0 {
		l.rely(start, got.valid)
		pool.do(func(now time.Time, p *Pool) {
			l.mu.Lock()
			defer l.mu.Unlock()
			p.Grant(now, l.parted.without(got.slots))
		})
	}
	return len(got.slots)
}

func (f *feeder) preempt(ctx context.Context, want int) {
	l := f.leases
	n := 0
	answered := f.ask(ctx, "preempt", func(ctx context.Context) (err error) {
		n, err = l.store.preempt(ctx, f.model, want)
		return err
	})
	if answered && n > 0 {
		l.log.Info("durable runs preempted for online requests", "model", f.model, "runs", n, "waiting", want)
		l.mu.Lock()
		l.figures.Preempted += int64(n)
		l.mu.Unlock()
	}
}
