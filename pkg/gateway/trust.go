package gateway

import (
	"context"
	"time"
)

// A gateway that was stopped, as by SIGSTOP, and goes on, may hold slots in its memory that others got in the
// meantime. It uses slots only while they are trusted. The trust is moved on while the process runs; once it has
// lapsed, a comparison with the database alone renews it. Times are those of Go's monotonic clock, which does not
// count the time for which the machine itself is suspended: such a stop is not noticed here.

// trustMax bounds the trust, and trustEvery is the time between two moves.
const (
	trustMax   = 15 * time.Second
	trustEvery = 500 * time.Millisecond
)

// trust is for how long slots are used after the process was seen to run: half a lease, so that it ends before the
// lease does.
func (l *Leases) trust() time.Duration { return min(l.config.NodeLease/2, trustMax) }

// keepTrust moves the trust on until ctx ends, and drops slots that may not be relied on any more. It sends no
// statement: a database that keeps one without an answer delays neither.
func (l *Leases) keepTrust(ctx context.Context) {
	ticks := time.NewTicker(trustEvery)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			l.moveTrust()
			l.expire()
		}
	}
}

// moveTrust lets slots be used for as long as the trust lasts, since the process runs. If it has lapsed, a comparison
// is asked for instead.
func (l *Leases) moveTrust() {
	now := time.Now()
	l.mu.Lock()
	lapsed := !l.trusted.IsZero() && now.After(l.trusted)
	l.mu.Unlock()
	if lapsed {
		l.compareAgain()
		return
	}
	l.trustUntil(now.Add(l.trust()))
}

// trustUntil lets slots be used until a time, unless they may be used for longer already.
func (l *Leases) trustUntil(until time.Time) {
	l.mu.Lock()
	if !until.After(l.trusted) {
		l.mu.Unlock()
		return
	}
	now, before := time.Now(), l.trusted
	l.trusted = until
	l.mu.Unlock()
	if !before.IsZero() && now.After(before) {
		l.log.Warn("the process was stopped: slots were compared before their next use",
			"for", now.Sub(before)+l.trust())
	}
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(now time.Time, p *Pool) { p.Trust(now, until) })
	}
}
