package main

import (
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// The report does not count the time in which a leader was held up against its recovery. That time is what the proxy
// saw: a delay may be longer than a lease, and a leader may give up before it is over.
func TestTheTimeInWhichALeaderIsHeldUpIsTheOneThatWasSeen(t *testing.T) {
	now := time.Now()
	for _, kind := range []pgproxy.Kind{pgproxy.Recover, pgproxy.Elect} {
		for _, fault := range []pgproxy.Fault{pgproxy.Swallow, pgproxy.Late, pgproxy.Mute, pgproxy.Slow} {
			p := newPolicy(1, false)
			p.Happened(nil, kind, fault, now, now.Add(9*time.Second))
			if len(p.delayed) != 1 {
				t.Fatalf("%s, %v: %d disturbances", kind, fault, len(p.delayed))
			}
			if d := p.delayed[0]; !d.From.Equal(now) || !d.To.Equal(now.Add(9*time.Second)) {
				t.Errorf("%s, %v: from %v to %v", kind, fault, d.From.Sub(now), d.To.Sub(now))
			}
		}
	}
	p := newPolicy(1, false)
	if p.Happened(nil, pgproxy.Push, pgproxy.Slow, now, now); len(p.delayed) != 0 {
		t.Errorf("a push: %v", p.delayed)
	}
}
