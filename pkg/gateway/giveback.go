package gateway

import (
	"context"
	"math"
	"slices"
	"time"
)

// tick compares what is held with the database, gives back what is not needed, and ends what may not be
// relied on any more.
func (l *Leases) tick(ctx context.Context) {
	l.compare(ctx)
	l.expire()
	var names []string // of the models of which something could be given back
	for _, r := range l.pools.models.all() {
		r.gate.do(func(_ time.Time, p *Pool) {
			if held, _ := p.fleet.held(); held > 0 {
				names = append(names, r.model.Name)
			}
		})
	}
	shares, err := l.readShares(ctx, names)
	if err != nil {
		for _, r := range l.pools.models.all() {
			r.gate.do(func(now time.Time, p *Pool) { p.keepOwed(now) })
		}
		return
	}
	for _, r := range l.pools.models.all() {
		share, contended := shares[r.model.Name]
		out := l.surplus(r.gate, share, contended)
		if len(out) > 0 {
			l.giveBack(ctx, r.gate, out)
		}
	}
}

// readShares reads the shares of those models of which other nodes go without.
func (l *Leases) readShares(ctx context.Context, names []string) (map[string]shareOf, error) {
	if len(names) == 0 {
		return nil, nil
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	shares, err := l.store.shares(bounded, names)
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
func (l *Leases) surplus(g *gate, share shareOf, contended bool) (out []SlotKey) {
	s := l.supplyOf(g.model)
	g.do(func(now time.Time, p *Pool) {
		s.peak = max(float64(g.peak), s.peak*peakFalls)
		g.peak = p.stock
		held, idle := p.fleet.held()
		n := surplusOf(held, idle, p.stock+p.waiting, s.peak, share.slots, contended)
		out = p.Retire(now, n)
		p.owe(0)
		if contended {
			p.owe(min(held-share.slots, share.short) - len(out) - len(p.left))
		}
	})
	return out
}

// hintLasts is for how long a hint holds that other nodes miss slots. They lease at least as often, with a hint each
// time (see LeasesConfig.GapMax).
const hintLasts = 300 * time.Millisecond

// handOver gives the idle slots of a pool that it does not need to the nodes that miss some, no more than those miss.
// What comes idle while the hint lasts follows.
func (l *Leases) handOver(ctx context.Context, model string) {
	g := l.gate(model)
	if g == nil {
		return
	}
	spare := 0
	g.do(func(now time.Time, p *Pool) {
		if spare = spareOf(p); spare == 0 {
			g.hinted = now.Add(hintLasts)
		}
	})
	if spare == 0 {
		return
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	missed, err := l.store.missed(bounded, model)
	if !l.note(err, "read what is missed") || missed == 0 {
		return
	}
	var out []SlotKey
	g.do(func(now time.Time, p *Pool) {
		spare := spareOf(p)
		if n := min(spare, missed); n > 0 {
			out = p.Retire(now, n)
		}
		if missed > spare {
			g.hinted = now.Add(hintLasts)
		}
	})
	if len(out) > 0 {
		l.giveBack(ctx, g, out)
	}
}

// spareOf is how many idle slots a pool could do without while other nodes go without.
func spareOf(p *Pool) int {
	held, idle := p.fleet.held()
	return min(max(0, held-needOf(p.stock+p.waiting)), idle)
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

func (l *Leases) giveBack(ctx context.Context, g *gate, out []SlotKey) {
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	if err := l.store.release(bounded, g.model, out); !l.note(err, "give back") {
		l.mu.Lock()
		l.check = true // whether they are still held is not known
		l.mu.Unlock()
		return
	}
	l.mu.Lock()
	l.figures.Returned += int64(len(out))
	l.mu.Unlock()
}

func (l *Leases) giveBackAll(ctx context.Context) {
	l.sendDoubts(ctx)
	for _, r := range l.pools.models.all() {
		var out []SlotKey
		r.gate.do(func(now time.Time, p *Pool) {
			_, idle := p.fleet.held()
			out = append(p.surrender(), p.Retire(now, idle)...)
		})
		if len(out) > 0 {
			l.giveBack(ctx, r.gate, out)
		}
	}
}

func (l *Leases) sendDoubts(ctx context.Context) {
	l.mu.Lock()
	doubts := l.doubts
	l.doubts = nil
	l.mu.Unlock()
	if len(doubts) == 0 {
		return
	}
	slots, reasons := make([]SlotKey, len(doubts)), make([]string, len(doubts))
	for i, d := range doubts {
		slots[i], reasons[i] = d.slot, d.reason
	}
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	ok := l.note(l.store.doubt(bounded, slots, reasons), "mark doubts")
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ok {
		l.doubts = append(doubts, l.doubts...)
		return
	}
	l.figures.Doubted += int64(len(doubts))
}

// compare reads which slots are this gateway's: those that were lost shrink the ceilings at once, those
// that were handed over are used.
func (l *Leases) compare(ctx context.Context) {
	start := time.Now()
	before := l.holding()
	bounded, cancel := context.WithTimeout(ctx, l.config.Timeout)
	defer cancel()
	held, err := l.store.held(bounded)
	if !l.note(err, "compare") {
		return
	}
	if time.Since(start) > l.trust() {
		l.compareAgain() // the process was stopped: others may have got since then what was held
		return
	}
	l.rely(start, held.valid)
	l.mu.Lock()
	l.strict = false
	l.mu.Unlock()
	ours := map[SlotKey]bool{}
	byInstance := map[int32][]SlotKey{}
	for _, s := range held.slots {
		ours[s] = true
		byInstance[s.Instance] = append(byInstance[s.Instance], s)
	}
	for _, r := range l.pools.models.all() {
		l.align(r.gate, ours, before[r.gate], byInstance)
	}
	l.trustUntil(start.Add(l.trust())) // its answer says nothing about later times
}

// holding lists what the pools hold. Slots that come in while the question is on its way are not judged
// by its answer.
func (l *Leases) holding() map[*gate][]SlotKey {
	all := map[*gate][]SlotKey{}
	for _, r := range l.pools.models.all() {
		r.gate.do(func(_ time.Time, p *Pool) {
			for _, i := range p.fleet.instances {
				for s := range i.held {
					all[r.gate] = append(all[r.gate], s)
				}
			}
		})
	}
	return all
}

// align drops what a pool held and is not ours, and adds what is ours and the pool does not hold. A slot whose
// call was put in doubt since the question was sent is not added: a call is put in doubt before its pool drops
// the slot, so that under the lock of the pool the doubts are complete.
func (l *Leases) align(g *gate, ours map[SlotKey]bool, before []SlotKey, byInstance map[int32][]SlotKey) {
	g.do(func(now time.Time, p *Pool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		var lost, fresh []SlotKey
		for _, s := range before {
			if !ours[s] {
				lost = append(lost, s)
			}
		}
		for _, i := range p.fleet.instances {
			for _, s := range byInstance[i.id] {
				if _, known := i.held[s]; !known && !l.doubted(s) {
					fresh = append(fresh, s)
				}
			}
		}
		p.Lose(now, lost)
		p.Grant(now, fresh)
		if len(fresh) > 0 {
			l.supplyOf(g.model).gap = 0 // others have slots to give
		}
		l.figures.Lost += int64(len(lost))
		l.figures.Granted += int64(len(fresh))
	})
}

// doubted says whether the call on a slot is in doubt and the database has not been told; called with mu held.
func (l *Leases) doubted(s SlotKey) bool {
	return slices.ContainsFunc(l.doubts, func(d doubtful) bool { return d.slot == s })
}

// expire drops slots that may not be relied on: with the lease where the policy is strict, else when the
// database has not answered for AwayMax. A gateway that was stopped and goes on finds its lease over.
func (l *Leases) expire() {
	now := time.Now()
	l.mu.Lock()
	over := now.After(l.sure)
	silent := now.Sub(l.answer)
	l.mu.Unlock()
	if !over {
		return
	}
	for _, r := range l.pools.models.all() {
		if !r.model.Policy.StrictSlots && silent < l.config.AwayMax {
			continue
		}
		r.gate.do(func(now time.Time, p *Pool) {
			var all []SlotKey
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
