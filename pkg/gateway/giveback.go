package gateway

import (
	"context"
	"math"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// tick gives back what is not needed.
func (l *Leases) tick(ctx context.Context) {
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
		l.mu.Lock()
		leaser := l.leaser(r.model.Name)
		l.mu.Unlock()
		share, contended := shares[r.model.Name]
		leaser.giveBackSurplus(r.pool, share, contended)
		l.mu.Lock()
		due := leaser.leaving.Due()
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
	bounded, cancel := context.WithTimeout(ctx, l.config.timeout)
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

// giveBackSurplus takes the idle slots that are not needed out of a pool, to be given back: a quarter of those
// beyond 1.25 x the recent peak + 2, and, while other nodes go without, all beyond the calls in flight and those
// that wait, or beyond the gateway's share. A pool that has not been called of late keeps none, so that other nodes
// need not ask for slots that are of no use here. Where other nodes miss slots below their shares, busy slots
// beyond the gateway's go back when their calls end: a pool whose requests wait has no idle ones.
func (l *leaser) giveBackSurplus(pool *sharedPool, share slot.Share, contended bool) {
	pool.do(func(now time.Time, p *Pool) {
		pool.usual = max(float64(pool.peak), pool.usual*peakFalls)
		pool.peak = p.inFlight
		held, idle := p.fleet.held()
		n := surplusOf(held, idle, p.inFlight+p.waiting, pool.usual, share.Slots, contended)
		out := p.Retire(now, n)
		l.giveBackSoon(out)
		p.owe(0)
		if contended {
			p.owe(min(held-share.Slots, share.Shortage) - len(out) - len(p.returning))
		}
	})
}

// hintLasts is for how long a hint holds that other nodes miss slots. They lease at least as often, with a hint each
// time (see gapMax).
const hintLasts = 300 * time.Millisecond

// offerIdle offers the idle slots of a pool that it does not need to the nodes that miss some, which get no more than
// they miss; the others stay. What comes idle while the hint lasts follows.
func (l *leaser) offerIdle(ctx context.Context) {
	leases := l.leases
	pool := leases.pool(l.model)
	if pool == nil {
		return
	}
	var out []slot.Held
	pool.do(func(now time.Time, p *Pool) {
		if out = p.Retire(now, spareOf(p)); len(out) == 0 {
			pool.hinted = now.Add(hintLasts)
		}
		leases.mu.Lock()
		defer leases.mu.Unlock()
		l.leaving.Note(out...)
	})
	if len(out) == 0 {
		return
	}
	missed := 0
	answered := l.execute(ctx, "offer", func(ctx context.Context) (err error) {
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
		l.leaving.Keep(out[gone:]...)
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

// giveBackSoon notes that slots are out of their pool and go back. It is called under the pool's lock.
func (l *leaser) giveBackSoon(slots []slot.Held) {
	l.leases.mu.Lock()
	defer l.leases.mu.Unlock()
	l.leaving.GiveBack(slots...)
}

// giveBack gives the slots back that are out of their pool.
func (l *leaser) giveBack(ctx context.Context) {
	l.leases.mu.Lock()
	out := l.leaving.TakeBack()
	l.leases.mu.Unlock()
	if len(out) > 0 {
		l.gaveBack(out, l.execute(ctx, "give back", func(ctx context.Context) error {
			return l.leases.holder.HandOver(ctx, l.model, out)
		}))
	}
}

// gaveBack notes whether slots were given back.
func (l *leaser) gaveBack(out []slot.Held, answered bool) {
	l.leases.mu.Lock()
	defer l.leases.mu.Unlock()
	l.leaving.GaveBack(time.Now(), answered, out...)
	if answered {
		l.leases.figures.Returned += int64(len(out))
	}
}

func (l *leaser) sendDoubts(ctx context.Context) {
	leases := l.leases
	leases.mu.Lock()
	doubts := l.leaving.TakeDoubts()
	leases.mu.Unlock()
	if len(doubts) == 0 {
		return
	}
	ok := l.execute(ctx, "mark doubts", func(ctx context.Context) error {
		return leases.holder.Doubt(ctx, doubts)
	})
	leases.mu.Lock()
	defer leases.mu.Unlock()
	l.leaving.Doubted(time.Now(), ok, doubts...)
	if ok {
		leases.figures.Doubted += int64(len(doubts))
	}
}
