package gateway

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

func TestLimitFallsWithSignsOfOverloadAndGrowsWithUse(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	one, full := 1, 0.95
	l := newLimiter(100, now)
	l.report(now, now.Add(-6*time.Second), &one, &full)
	if l.value() != 100 {
		t.Errorf("stale readings moved the limit to %d", l.value())
	}
	for range 5 {
		l.report(now, now.Add(-time.Second), &one, nil)
	}
	if l.value() != 100 {
		t.Errorf("one probe that was read five times moved the limit to %d", l.value())
	}
	l.report(now, now, &one, nil)
	if l.value() != 90 {
		t.Errorf("two probes with waiting requests: limit is %d", l.value())
	}
	l.busy(now.Add(100 * time.Millisecond))
	if l.value() != 90 {
		t.Errorf("a second sign in the same moment: limit is %d", l.value())
	}
	l.report(now.Add(2*time.Second), now.Add(2*time.Second), nil, &full)
	if l.value() != 81 {
		t.Errorf("full cache: limit is %d", l.value())
	}
	for i := range 3 {
		l.report(now.Add(time.Duration(3+i)*time.Second), now.Add(2*time.Second), nil, &full)
	}
	if l.value() != 81 {
		t.Errorf("the same probe four times: limit is %d", l.value())
	}
	for i := range 400 {
		l.grow(now.Add(time.Duration(3+10*i)*time.Second), 0)
	}
	if l.value() != 81 {
		t.Errorf("grew to %d without use", l.value())
	}
	for i := range 400 {
		l.grow(now.Add(time.Duration(5000+10*i)*time.Second), 100)
	}
	if l.value() != 100 {
		t.Errorf("with use the limit is %d", l.value())
	}
	l.resize(10)
	if l.value() != 10 {
		t.Errorf("after the instance shrank the limit is %d", l.value())
	}
}

// Streams that are slower than their clients accept lower the limit of their instance; without the setting, and for
// answers that come whole, their time says nothing.
func TestSlowTokensLowerTheLimit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		most  time.Duration
		taken CallEnd
		falls bool
	}{
		"slow":       {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: 21}, true},
		"fast":       {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, First: 2 * time.Second, TokensOut: 21}, false},
		"no limit":   {0, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: 21}, false},
		"few tokens": {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: paceTokens}, false},
		"whole":      {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, TokensOut: 21}, false},
		"one token":  {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: 1}, false},
		"no bound":   {1e9 * time.Second, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: 21}, false},
		"very many":  {3 * time.Second, CallEnd{Took: 3 * time.Second, First: time.Second, TokensOut: 1 << 32}, false},
		"no room":    {80 * time.Millisecond, CallEnd{Busy: true}, true}, // as before
		"broken off": {80 * time.Millisecond, CallEnd{Took: 3 * time.Second, First: time.Second, Failed: true}, false},
	} {
		policy := DefaultPolicy()
		policy.TPOTMax = worker.Seconds(c.most)
		x := newTraffic(1, 1, 20, policy)
		r := &Request{Flow: "a", Criticality: Default}
		if inFlight, refused := x.pools[0].Arrive(x.now, r); !inFlight {
			t.Fatal(refused)
		}
		x.pools[0].End(x.now.Add(3*time.Second), r, c.taken)
		if got := x.pools[0].ceiling(); (got < 20) != c.falls {
			t.Errorf("%s: the ceiling is %d of 20", name, got)
		}
	}
}
