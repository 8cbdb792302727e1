package gateway

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// tick gives back what is not needed, and ends what may not be relied on any more.
func (l *Leases) tick(ctx context.Context) {
	l.expire()
	var names []string // of the models of which something could be given back
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) {
			if held, _ := p.fleet.held(); held > 0 {
				names = append(names, r.model.Name)
			}
		})
	}
	shares, err := l.readShares(ctx, names)
	if err != nil {
		for _, r := range l.gateway.models.all() {
			r.pool.do(func(now time.Time, p *Pool) { p.keepOwed(now) })
		}
		return
	}
	for _, r := range l.gateway.models.all() {
		share, contended := shares[r.model.Name]
		out := l.surplus(r.pool, share, contended)
		l.mu.Lock()
		leaser := l.leaser(r.model.Name)
		leaser.back = append(leaser.back, out...)
		due := len(leaser.back)+len(leaser.doubts) > 0
		l.mu.Unlock()
		if due {
			l.wakeLeaser(leaser)
		}
	}
}

// readShares reads the shares of those models of which other nodes go without.
func (l *Leases) readShares(ctx context.Context, names []string) (map[string]slot.Share, error) {
	if len(names) == 0 {
		return nil, nil
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	shares, err := l.holder.SharesAndShortages(bounded, names)
	l.note(err, "read shares")
	return shares, err
}

// Bounds on the idle slots that a gateway keeps.
const (
	keepFactor = 1.25 // of the recent peak of calls in flight
	keepMore   = 2
	keepPart   = 0.25 // of what is beyond goes back each second
	peakFalls  = 0.9  // of the recent peak stays after a second
	peakNone   = 0.05 // a peak below has been over for half a minute or longer: nothing is kept
)

// surplus takes the idle slots that are not needed out of a pool: a quarter of those beyond 1.25 x the recent
// peak + 2, and, while other nodes go without, all beyond the calls in flight and those that wait, or beyond the
// gateway's share. A pool that has not been called of late keeps none, so that other nodes need not ask for slots
// that are of no use here. Where other nodes miss slots below their shares, busy slots beyond the gateway's go back
// when their calls end: a pool whose requests wait has no idle ones.
func (l *Leases) surplus(pool *sharedPool, share slot.Share, contended bool) (out []slot.Held) {
	pool.do(func(now time.Time, p *Pool) {
		pool.usual = max(float64(pool.peak), pool.usual*peakFalls)
		pool.peak = p.inFlight
		held, idle := p.fleet.held()
		n := surplusOf(held, idle, p.inFlight+p.waiting, pool.usual, share.Slots, contended)
		out = l.noteDropped(p.Retire(now, n))
		p.owe(0)
		if contended {
			p.owe(min(held-share.Slots, share.Shortage) - len(out) - len(p.left))
		}
	})
	return out
}

// hintLasts is for how long a hint holds that other nodes miss slots. They lease at least as often, with a hint each
// time (see gapMax).
const hintLasts = 300 * time.Millisecond

// handOver offers the idle slots of a pool that it does not need to the nodes that miss some, which get no more than
// they miss; the others stay. What comes idle while the hint lasts follows.
func (l *leaser) handOver(ctx context.Context) {
	leases := l.leases
	pool := leases.pool(l.model)
	if pool == nil {
		return
	}
	var out []slot.Held
	pool.do(func(now time.Time, p *Pool) {
		if out = leases.noteDropped(p.Retire(now, spareOf(p))); len(out) == 0 {
			pool.hinted = now.Add(hintLasts)
		}
	})
	if len(out) == 0 {
		return
	}
	missed := 0
	answered := l.execute(ctx, "hand over", func(ctx context.Context) (err error) {
		missed, err = leases.holder.Offer(ctx, l.model, out)
		return err
	})
	if !answered {
		l.gaveBack(out, false)
		return
	}
	gone := min(missed, len(out))
	l.gaveBack(out[:gone], true)
	pool.do(func(now time.Time, p *Pool) {
		leases.mu.Lock()
		leases.droppedSlots.forget(out[gone:]...)
		leases.mu.Unlock()
		p.Grant(now, out[gone:])
		if missed > len(out) {
			pool.hinted = now.Add(hintLasts)
		}
	})
}

// spareOf is how many idle slots a pool could do without while other nodes go without.
func spareOf(p *Pool) int {
	held, idle := p.fleet.held()
	return min(max(0, held-needOf(p.inFlight+p.waiting)), idle)
}

// needOf is how many slots are needed for so many calls, in flight and waiting, while other nodes go without.
func needOf(calls int) int { return calls + calls/4 }

// surplusOf is how many idle slots go back now.
func surplusOf(held, idle, need int, peak float64, share int, contended bool) int {
	keep := keepFactor*peak + keepMore
	if peak < peakNone {
		keep = 0
	}
	n := int(math.Ceil(keepPart * (float64(held) - keep)))
	if contended {
		n = max(n, held-needOf(need), held-share)
	}
	return min(max(n, 0), idle)
}

// noteDropped notes that slots are out of their pool. It is called under the pool's lock.
func (l *Leases) noteDropped(slots []slot.Held) []slot.Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.droppedSlots.add(slots...)
	return slots
}

// giveBack gives slots back that their pool has dropped.
func (l *leaser) giveBack(ctx context.Context, out []slot.Held) {
	if len(out) > 0 {
		l.gaveBack(out, l.execute(ctx, "give back", func(ctx context.Context) error {
			return l.leases.holder.HandOver(ctx, l.model, out)
		}))
	}
}

// gaveBack notes that slots were given back. A give-back without an answer may be carried out at any later time: its
// slots are not used again, and are given back once more under the same tokens, which changes nothing where they are
// gone.
func (l *leaser) gaveBack(out []slot.Held, answered bool) {
	leases := l.leases
	leases.mu.Lock()
	defer leases.mu.Unlock()
	if !answered {
		l.back = append(l.back, out...)
		return
	}
	leases.figures.Returned += int64(len(out))
	leases.droppedSlots.reported(out...)
}

func (l *Leases) giveBackAll(ctx context.Context) {
	var group sync.WaitGroup
	for _, r := range l.gateway.models.all() {
		var out []slot.Held
		r.pool.do(func(now time.Time, p *Pool) {
			_, idle := p.fleet.held()
			out = l.noteDropped(append(p.surrender(), p.Retire(now, idle)...))
		})
		l.mu.Lock()
		leaser := l.leaser(r.model.Name)
		out = append(out, leaser.back...)
		leaser.back = nil
		l.mu.Unlock()
		group.Go(func() {
			leaser.sendDoubts(ctx)
			leaser.giveBack(ctx, out)
		})
	}
	group.Wait()
}

// leaveTries is how often the gateway tries to leave, each time for LeasesConfig.Timeout at most.
const leaveTries = 3

// leave removes the gateway's row together with what the database has as its slots: a lease whose answer was lost may
// have brought some that no pool knows, and may still run. Slots of calls that have not ended stay, and those of doubts
// that the database has not heard of: instances are asked about both, as about the slots of a dead node.
func (l *Leases) leave(ctx context.Context) {
	var models []string
	busy := []int64{} // not null
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) { busy = append(busy, p.fleet.busyTokens()...) })
	}
	l.mu.Lock()
	for model, leaser := range l.leasers {
		models = append(models, model)
		for _, d := range leaser.doubts {
			busy = append(busy, d.Token)
		}
	}
	l.mu.Unlock()
	for range leaveTries {
		bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
		left := l.note(l.removeGateway(bounded, models, busy), "leave")
		if !left {
			<-bounded.Done() // the database may be back by then
		}
		cancel()
		if left {
			return
		}
	}
}

const leaveSQL = `SELECT penstock.leave_gateway($1, $2, $3)`

// removeGateway removes the gateway's row and frees its slots, apart from those that are busy, by their tokens. No lease
// of the models and no hand-over to the gateway that is under way takes effect behind it.
func (l *Leases) removeGateway(ctx context.Context, models []string, busy []int64) error {
	if _, err := l.holder.DB.Exec(ctx, leaveSQL, l.holder.Node(), models, busy); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}

func (l *leaser) sendDoubts(ctx context.Context) {
	leases := l.leases
	leases.mu.Lock()
	doubts := l.doubts
	l.doubts = nil
	leases.mu.Unlock()
	if len(doubts) == 0 {
		return
	}
	ok := l.execute(ctx, "mark doubts", func(ctx context.Context) error {
		return leases.holder.Doubt(ctx, doubts)
	})
	leases.mu.Lock()
	defer leases.mu.Unlock()
	if !ok {
		l.doubts = append(doubts, l.doubts...)
		return
	}
	for _, d := range doubts {
		leases.droppedSlots.reported(d.Held)
	}
	leases.figures.Doubted += int64(len(doubts))
}

// compare reads which slots are this gateway's: those that were lost shrink the ceilings at once, those
// that were handed over are used.
func (l *Leases) compare(ctx context.Context) {
	start := time.Now()
	l.mu.Lock()
	l.droppedSlots.forgetBefore(start)
	l.reading, l.granted = l.granted, false
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.reading = false
		l.mu.Unlock()
	}()
	before := l.holding()
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	held, err := l.holder.Slots(bounded)
	if !l.note(err, "compare") {
		return
	}
	if time.Since(start) > l.trust() {
		l.compareAgain() // the process was stopped: others may have got since then what was held
		return
	}
	l.extendLease(held.Until)
	ours := map[slot.Held]bool{}
	byInstance := map[int32][]slot.Held{}
	for _, s := range held.Slots {
		ours[s] = true
		byInstance[s.Instance] = append(byInstance[s.Instance], s)
	}
	for _, r := range l.gateway.models.all() {
		l.align(r.pool, ours, before[r.pool], byInstance)
	}
	l.trustUntil(start.Add(l.trust())) // its answer says nothing about later times
}

// holding lists what the pools hold. Slots that come in while the question is on its way are not judged
// by its answer.
func (l *Leases) holding() map[*sharedPool][]slot.Held {
	all := map[*sharedPool][]slot.Held{}
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) {
			for _, i := range p.fleet.instances {
				for s := range i.held {
					all[r.pool] = append(all[r.pool], s)
				}
			}
		})
	}
	return all
}

// align drops what a pool held and is not ours, and adds what is ours and the pool does not hold. A slot that was put
// in doubt or given back is not added, unless the database knew that when the question was sent: pools drop slots
// under their locks.
func (l *Leases) align(pool *sharedPool, ours map[slot.Held]bool, before []slot.Held, byInstance map[int32][]slot.Held) {
	fresh := 0
	pool.do(func(now time.Time, p *Pool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		var lost, came []slot.Held
		for _, s := range before {
			if !ours[s] {
				lost = append(lost, s)
			}
		}
		for _, i := range p.fleet.instances {
			for _, s := range l.droppedSlots.without(byInstance[i.id]) {
				if _, known := i.held[s]; !known {
					came = append(came, s)
				}
			}
		}
		p.Lose(now, lost)
		p.Grant(now, came)
		fresh = len(came)
		if fresh > 0 {
			l.leaser(pool.model).handedOver = true
		}
		l.figures.Lost += int64(len(lost))
		l.figures.Granted += int64(fresh)
	})
	if fresh > 0 {
		l.wakeWanting()
	}
}

// awayMax is for how long slots that are held count while the database is away.
const awayMax = 15 * time.Minute

// expire drops slots that may not be relied on: with the lease where the policy is strict, else when the
// database has not answered for awayMax. A gateway that was stopped and goes on finds its lease over.
func (l *Leases) expire() {
	now := time.Now()
	l.mu.Lock()
	over := now.After(l.leaseUntil)
	silent := now.Sub(l.answer)
	l.mu.Unlock()
	if !over {
		return
	}
	for _, r := range l.gateway.models.all() {
		if !r.model.Policy.StrictSlots && silent < awayMax {
			continue
		}
		r.pool.do(func(now time.Time, p *Pool) {
			var all []slot.Held
			for _, i := range p.fleet.instances {
				for s := range i.held {
					all = append(all, s)
				}
			}
			if len(all) > 0 {
				l.log.Error("slots dropped: the database has not answered", "model", r.model.Name, "slots",
					len(all), "silent", silent)
				p.Lose(now, all)
			}
		})
	}
}
