package judge

import (
	"testing"
	"time"
)

// refusedCallback is the good history, whose callback was refused so many times, the last time at 1 s. Deliveries were
// recorded until a moment.
func refusedCallback(times int, until time.Time) *History {
	h := good()
	h.CallbackWaits, h.Quiet, h.Received = []time.Duration{6 * time.Second, 6 * time.Minute}, at(2000), until
	h.Deliveries = nil
	for i := range times {
		h.Deliveries = append(h.Deliveries, Delivery{ID: "id", Entry: 14, Outcome: "cancelled", At: at(1000 - 100*i)})
	}
	return h
}

// poison lets the entry of the callback end after so many deaths of nodes.
func poison(deaths int) func(h *History) {
	return func(h *History) {
		h.CallbackCrashes, h.Callbacks = 3, map[int64]int64{14: 90}
		h.Endings = append(h.Endings, Ending{
			Seq: 900, Entry: 90, Queue: "webhook", Outcome: "failed", Class: classPoison, Crashes: deaths,
		})
		for i := range deaths {
			h.Grants = append(h.Grants, Grant{
				Seq: int64(910 + 2*i), Queue: "webhook", Key: "#90", Token: int64(900 + i), Last: 90, Process: "n1",
				At: at(700), FreeBegan: at(4900 + i), Freed: at(4900 + i), FreedSeq: int64(911 + 2*i),
			})
		}
	}
}

func twoIDs(spoil func(h *History)) func(h *History) {
	return func(h *History) { spoil(h); h.Deliveries[0].ID = "other" }
}

func others(spoil func(h *History)) func(h *History) {
	return func(h *History) { spoil(h); h.Callbacks[14] = 91 }
}

func TestACallbackThatIsRefusedComesAgain(t *testing.T) {
	const promise = "one delivery id for each ending"
	const due, limit = 7000, 3000 + 2000 + 3000 + 100 // the wait, and what it may take then
	for name, c := range map[string]struct {
		h      *History
		spoil  func(h *History)
		broken bool
	}{
		"it does not":                         {refusedCallback(1, at(due+limit+1)), func(*History) {}, true},
		"it has time yet":                     {refusedCallback(1, at(due+limit)), func(*History) {}, false},
		"twice refused, with minutes to wait": {refusedCallback(2, at(60_000)), func(*History) {}, false},
		"twice refused, and minutes later":    {refusedCallback(2, at(361_000+limit+1)), func(*History) {}, true},
		"refused more often than is judged":   {refusedCallback(3, at(9_000_000)), func(*History) {}, false},
		"it was accepted in the end": {refusedCallback(2, at(9_000_000)), func(h *History) {
			h.Deliveries[1].Accepted = true
		}, false},
		"other work was left until then": {refusedCallback(1, at(due+limit+1)), func(h *History) { h.Quiet = at(7100) }, false},
		"no leader was there for a second": {refusedCallback(1, at(due+limit+1000)), func(h *History) {
			h.Disturbances = []Disturbance{{"a", at(8000), at(9000)}}
		}, false},
		"no leader was there, and long after": {refusedCallback(1, at(due+limit+1001)), func(h *History) {
			h.Disturbances = []Disturbance{{"a", at(8000), at(9000)}}
		}, true},
		"its entry was given up as poison":     {refusedCallback(1, at(9_000_000)), poison(3), false},
		"given up after too few deaths":        {refusedCallback(1, at(9_000_000)), poison(2), true},
		"poison, and it was never delivered":   {refusedCallback(0, at(9_000_000)), poison(3), false},
		"never delivered, after too few":       {refusedCallback(0, at(9_000_000)), poison(2), true},
		"poison, and delivered under two ids":  {refusedCallback(2, at(9_000_000)), twoIDs(poison(3)), true},
		"another entry was given up as poison": {refusedCallback(1, at(9_000_000)), others(poison(3)), true},
		"the server's clock jumped":            {refusedCallback(1, at(9_000_000)), func(h *History) { h.ClockJumped = true }, false},
	} {
		c.spoil(c.h)
		if n := broken(c.h)[promise]; n > 0 != c.broken {
			t.Errorf("%s: %d reports, want some: %v", name, n, c.broken)
		}
	}
}
