package gateway

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// leaser leases and gives back the slots of one model. Its goroutine runs while there is something to do.
type leaser struct {
	leases *Leases
	model  string
	wake   chan struct{} // holds one: something is due

	// Under the lock of the leases.
	running    bool
	due        bool
	wantsSlots bool         // requests of the pool wait for slots, or slots are to be given back
	offerDue   bool         // another node misses slots of the model
	received   bool         // other nodes have handed slots over: they have some to give
	leaving    slot.Leaving // out of the pool, or about to be: see Leases.doubt

	// Of the goroutine.
	failed time.Time // when the database did not answer the last statement; zero: it did
	pacing leasePacing
}

// idle reports that nothing is due, and that the database knows of all slots that have left. Called with the lock of
// the leases held.
func (l *leaser) idle() bool {
	return !l.running && !l.due && !l.wantsSlots && !l.offerDue && l.leaving.Empty()
}

// run does what is due until nothing is, or ctx ends.
func (l *leaser) run(ctx context.Context) {
	leases := l.leases
	for {
		next := l.pass(ctx)
		leases.mu.Lock()
		if ctx.Err() != nil || !l.due && next.IsZero() {
			l.running = false
			leases.mu.Unlock()
			return
		}
		due := l.due
		leases.mu.Unlock()
		if due {
			continue
		}
		var soon <-chan time.Time
		if !next.IsZero() {
			soon = time.After(max(time.Until(next), time.Millisecond))
		}
		select {
		case <-ctx.Done():
		case <-l.wake:
		case <-soon:
		}
	}
}

// pass does what is due: slots in doubt, give-backs, offers, leases, preemptions. It returns when the next lease is
// due, zero if none is.
func (l *leaser) pass(ctx context.Context) time.Time {
	leases := l.leases
	l.sendDoubts(ctx)
	away := l.away()
	leases.mu.Lock()
	wantsSlots, offerDue := l.wantsSlots, l.offerDue
	l.due, l.offerDue = false, false
	if l.received {
		l.received, l.pacing.gap = false, 0
	}
	leases.mu.Unlock()
	if !away { // else the leases would wait for it each time
		l.giveBack(ctx)
	}
	if offerDue {
		l.offerIdle(ctx)
	}
	if !wantsSlots {
		return time.Time{}
	}
	return l.leaseWhileWaiting(ctx)
}

// execute sends a statement of the leaser, with a bound on its time.
func (l *leaser) execute(ctx context.Context, what string, send func(ctx context.Context) error) bool {
	leases := l.leases
	select {
	case leases.statements <- struct{}{}:
		defer func() { <-leases.statements }()
	case <-ctx.Done():
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, leases.config.timeout)
	defer cancel()
	err := send(bounded)
	l.failed = time.Time{}
	if err != nil {
		l.failed = time.Now()
	}
	return leases.answered(err, what, l.model)
}

// away says whether the database did not answer the last statement about all models, or just now that of the leaser.
func (l *leaser) away() bool {
	l.leases.mu.Lock()
	defer l.leases.mu.Unlock()
	return l.leases.failed || !l.failed.IsZero() && time.Since(l.failed) < l.leases.config.timeout
}

// leaseWhileWaiting leases for one pool whose requests wait. It returns when to try again, zero if no request waits. A
// pool without instances gets none: the statement records its demand, and wakes the autoscaler.
func (l *leaser) leaseWhileWaiting(ctx context.Context) time.Time {
	pool := l.leases.pool(l.model)
	if pool == nil {
		l.clearWantsSlots(nil)
		return time.Time{}
	}
	away := l.away()
	demand := l.readDemand(pool, away)
	if !away {
		l.giveBack(ctx)
	}
	if demand.slots == 0 {
		l.pacing.awaitingSince = time.Time{}
		l.withdraw(ctx)
		l.clearWantsSlots(pool)
		return time.Time{}
	}
	return l.leaseOrPreempt(ctx, pool, demand)
}

// poolDemand is the demand of a pool for slots.
type poolDemand struct {
	at     time.Time // when it was read
	slots  int       // see Pool.wanted
	oldest time.Time // see Pool.oldest
	mode   PoolMode
	policy PoolPolicy
	limits slot.Limited
}

// readDemand returns the demand of a pool. The slots that the pool owes are to be given back then. While the
// database is away it keeps them: they are of use here alone.
func (l *leaser) readDemand(pool *sharedPool, away bool) (d poolDemand) {
	d.at = time.Now()
	pool.do(func(now time.Time, p *Pool) {
		if away {
			p.keepOwed(now)
		} else {
			l.giveBackSoon(p.surrender())
		}
		d.slots, d.oldest, d.mode, d.policy = p.wanted(now), p.oldest(), p.mode, p.policy
		d.limits = p.limited(now)
	})
	return d
}

// leaseOrPreempt leases for a demand if a lease is due, and preempts durable runs for the slots that are still missing
// if that is due. It returns when either is due next.
func (l *leaser) leaseOrPreempt(ctx context.Context, pool *sharedPool, d poolDemand) time.Time {
	leases, pacing, missing := l.leases, &l.pacing, d.slots
	longest := pacing.adapt(d)
	due := preemptDue(d.policy, d.mode, d.oldest, pacing.preemptFrom)
	if !d.at.Before(pacing.next(d.oldest, due)) {
		if pacing.awaitsComparison(d.at, leases.granting()) {
			return d.at.Add(gapMin)
		}
		got := l.lease(ctx, pool, missing, d.limits)
		missing -= got
		pacing.leased(d.at, got, missing, longest)
	}
	if now := time.Now(); missing > 0 && !due.IsZero() && !now.Before(due) {
		l.preempt(ctx, missing)
		pacing.preemptFrom = now.Add(max(d.policy.PreemptAfter.Duration(), preemptGap))
		due = pacing.preemptFrom
	}
	next := pacing.next(d.oldest, due)
	if missing > 0 && !due.IsZero() && due.Before(next) {
		return due
	}
	return next
}

func (l *leaser) lease(ctx context.Context, pool *sharedPool, want int, limits slot.Limited) int {
	leases := l.leases
	var got slot.Holding
	answered := l.execute(ctx, "lease", func(ctx context.Context) (err error) {
		got, err = leases.holder.LeaseWithin(ctx, l.model, want, limits)
		return err
	})
	leases.mu.Lock()
	leases.figures.Leases++
	leases.mu.Unlock()
	if !answered {
		leases.compareAgain() // the answer may have been lost
		return 0
	}
	if len(got.Slots) > 0 {
		leases.extendNodeLease(got.Until)
		pool.do(func(now time.Time, p *Pool) {
			leases.mu.Lock()
			defer leases.mu.Unlock()
			leases.figures.Granted += int64(p.Grant(now, l.leaving.Without(got.Slots)))
		})
	}
	return len(got.Slots)
}

func (l *leaser) preempt(ctx context.Context, want int) {
	leases := l.leases
	n := 0
	answered := l.execute(ctx, "preempt", func(ctx context.Context) (err error) {
		n, err = leases.holder.Preempt(ctx, l.model, want)
		return err
	})
	if answered && n > 0 {
		leases.log.Info("durable runs preempted for online requests", "model", l.model, "runs", n, "waiting", want)
		leases.mu.Lock()
		leases.figures.Preempted += int64(n)
		leases.mu.Unlock()
	}
}

// withdraw tells the database that the pool misses no slots any more: until then other nodes keep back what they could
// use.
func (l *leaser) withdraw(ctx context.Context) {
	withdraw := func(ctx context.Context) error { return l.leases.holder.Withdraw(ctx, l.model) }
	if l.pacing.demandKnown && l.execute(ctx, "withdraw demand", withdraw) {
		l.pacing.demandKnown = false // otherwise the demand lapses by itself
	}
}

// clearWantsSlots notes that the pool wants no slots.
func (l *leaser) clearWantsSlots(pool *sharedPool) {
	l.leases.mu.Lock()
	l.wantsSlots = false
	l.leases.mu.Unlock()
	// A request that came in between found wantsSlots set, and woke no leaser.
	if pool != nil {
		pool.recheck()
	}
}
