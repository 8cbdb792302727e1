package main

import (
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// The judges do not count the time in which a leader was held up against its recovery. What holds it up at the end of a
// fault's window goes on beyond it.
func TestTheTimeInWhichALeaderIsHeldUpIsNotJudged(t *testing.T) {
	for fault, want := range map[pgproxy.Fault]struct{ before, after time.Duration }{
		pgproxy.Swallow: {},
		pgproxy.Late:    {after: 2 * time.Second},
		pgproxy.Mute:    {after: pgproxy.MuteMax},
		pgproxy.Slow:    {before: slowMax}, // reported when it is over
	} {
		for _, kind := range []pgproxy.Kind{pgproxy.Recover, pgproxy.Elect} {
			p := newPolicy(1, false)
			earliest := time.Now()
			p.Happened(nil, kind, fault)
			latest := time.Now()
			if len(p.delayed) != 1 {
				t.Fatalf("%s, %v: %d disturbances", kind, fault, len(p.delayed))
			}
			d := p.delayed[0]
			within := func(at time.Time, after time.Duration) bool {
				return !at.Before(earliest.Add(after)) && !at.After(latest.Add(after))
			}
			if !within(d.From, -want.before) || !within(d.To, want.after) {
				t.Errorf("%s, %v: from %v to %v of its report", kind, fault, d.From.Sub(earliest), d.To.Sub(earliest))
			}
		}
	}
	p := newPolicy(1, false)
	if p.Happened(nil, pgproxy.Push, pgproxy.Slow); len(p.delayed) != 0 {
		t.Errorf("a push: %v", p.delayed)
	}
}
