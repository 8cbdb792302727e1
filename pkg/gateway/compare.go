package gateway

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// compare reads which slots are this gateway's: those that were lost shrink the ceilings at once, those
// that were handed over are used.
func (l *Leases) compare(ctx context.Context) {
	start := time.Now()
	l.forget(start)
	l.mu.Lock()
	l.reading, l.granted = l.granted, false
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.reading = false
		l.mu.Unlock()
	}()
	before := l.holding()
	bounded, cancel := context.WithTimeout(ctx, l.config.timeout)
	defer cancel()
	held, err := l.holder.Slots(bounded)
	if !l.note(err, "compare") {
		return
	}
	if time.Since(start) > l.trust() {
		l.compareAgain() // the process was stopped: others may have got since then what was held
		return
	}
	l.extendNodeLease(held.Until)
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

// forget drops what the database knew before it is asked what the gateway holds, and the leasers of models that are not
// registered any more, once they have nothing to do.
func (l *Leases) forget(asked time.Time) {
	registered := map[string]bool{}
	for _, r := range l.gateway.models.all() {
		registered[r.model.Name] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for model, leaser := range l.leasers {
		leaser.leaving.ForgetBefore(asked)
		if !registered[model] && leaser.idle() {
			delete(l.leasers, model)
		}
	}
}

// holding lists what the pools hold. Slots that come in while the question is on its way are not judged
// by its answer.
func (l *Leases) holding() map[*sharedPool][]slot.Held {
	all := map[*sharedPool][]slot.Held{}
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) { all[r.pool] = p.fleet.slots() })
	}
	return all
}

// align drops what a pool held and is not ours, and adds what is ours and the pool does not hold. A slot that was put
// in doubt or given back is not added, unless the database knew that when the question was sent: pools drop slots
// under their locks.
func (l *Leases) align(pool *sharedPool, ours map[slot.Held]bool, before []slot.Held,
	byInstance map[int32][]slot.Held,
) {
	fresh := 0
	pool.do(func(now time.Time, p *Pool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		leaser := l.leaser(pool.model)
		var lost, ofPool []slot.Held
		for _, s := range before {
			if !ours[s] {
				lost = append(lost, s)
			}
		}
		for _, i := range p.fleet.instances {
			ofPool = append(ofPool, leaser.leaving.Without(byInstance[i.id])...)
		}
		p.Lose(now, lost)
		fresh = p.Grant(now, ofPool)
		if fresh > 0 {
			leaser.received = true
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
	over := now.After(l.nodeLeaseEnds)
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
			if all := p.fleet.slots(); len(all) > 0 {
				l.log.Error("slots dropped: the database has not answered", "model", r.model.Name, "slots",
					len(all), "silent", silent)
				p.Lose(now, all)
			}
		})
	}
}
