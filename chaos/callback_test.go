package main

import (
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// A callback that was refused once is waited for from when it is due again, and until it comes.
func TestACallbackIsOwedFromItsTimeUntilItComes(t *testing.T) {
	now := time.Now()
	refused := judge.Delivery{ID: "a", Entry: 1, At: now}
	accepted := judge.Delivery{ID: "a", Entry: 1, At: now.Add(5 * time.Second), Accepted: true}
	again := judge.Delivery{ID: "a", Entry: 1, At: now.Add(5 * time.Second)}
	for name, c := range map[string]struct {
		got   []judge.Delivery
		after time.Duration
		owed  bool
	}{
		"before its time":       {[]judge.Delivery{refused}, callbackWaits[0] - 1, false},
		"at its time":           {[]judge.Delivery{refused}, callbackWaits[0], true},
		"accepted":              {[]judge.Delivery{refused, accepted}, time.Hour, false},
		"refused again":         {[]judge.Delivery{refused, again}, time.Hour, false},
		"accepted at once":      {[]judge.Delivery{{ID: "b", Entry: 2, At: now, Accepted: true}}, time.Hour, false},
		"beside one of another": {[]judge.Delivery{{ID: "b", Entry: 2, At: now, Accepted: true}, refused}, time.Hour, true},
	} {
		w := &recorder{deliveries: c.got}
		if got := w.owed(now.Add(c.after)); got != c.owed {
			t.Errorf("%s: owed %v, want %v", name, got, c.owed)
		}
	}
}
