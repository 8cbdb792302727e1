package judge

import (
	"slices"
	"testing"
	"time"
)

const inOrder = "entries of a key start in the order of acceptance"

// handedBack is a key of two entries, 81 and 82. The worker was busy when 81 was called under token 160; under token
// 161 both run, one after the other.
func handedBack(h *History) {
	h.Pushes = append(h.Pushes,
		Push{Op: 81, Queue: "plain", Key: "r", Called: at(0), Returned: at(5), Told: true, Entry: 81},
		Push{Op: 82, Queue: "plain", Key: "r", Called: at(10), Returned: at(15), Told: true, Entry: 82})
	h.Insertions = append(h.Insertions, Insertion{Seq: 498, Entry: 81, Op: 81}, Insertion{Seq: 499, Entry: 82, Op: 82})
	h.Grants = append(h.Grants,
		Grant{Seq: 500, Queue: "plain", Key: "r", Token: 160, Last: 82, Process: "n3", At: at(11_000), Freed: at(11_200), FreedSeq: 510},
		Grant{Seq: 511, Queue: "plain", Key: "r", Token: 161, Last: 82, Process: "n3", At: at(11_300)})
	h.Calls = append(h.Calls,
		Call{Entry: 81, Token: 160, Op: 81, Begin: at(11_010), Closed: at(11_015), Answer: "busy"},
		Call{Entry: 81, Token: 161, Op: 81, Begin: at(11_310), Closed: at(11_320), Answer: "ok"},
		Call{Entry: 82, Token: 161, Op: 82, Begin: at(11_330), Closed: at(11_340), Answer: "ok"})
	h.Endings = append(h.Endings,
		Ending{Seq: 520, Entry: 81, Queue: "plain", Key: "r", Outcome: "done", Token: 161},
		Ending{Seq: 521, Entry: 82, Queue: "plain", Key: "r", Outcome: "done", Token: 161})
}

// goesOn lets the second entry be called under the token under which the first was handed back.
func goesOn(h *History) {
	h.Calls = append(h.Calls, Call{Entry: 82, Token: 160, Op: 82, Begin: at(11_020), Closed: at(11_030), Answer: "ok"})
}

// overtaken lets the second entry be called before the first, under the later token.
func overtaken(h *History) {
	call := &h.Calls[len(h.Calls)-1]
	call.Begin, call.Closed = at(11_305), at(11_308)
}

// withoutItsTurn removes the second call of the first entry.
func withoutItsTurn(h *History) {
	h.Calls = slices.DeleteFunc(h.Calls, func(c Call) bool { return c.Entry == 81 && c.Token == 161 })
}

// An entry of a key that is handed back, or recovered, is called again before those that were accepted after it.
func TestAnEntryOfAKeyKeepsItsTurn(t *testing.T) {
	for name, c := range map[string]struct {
		changes []func(h *History)
		broken  bool
	}{
		"it is called again first":                           {nil, false},
		"the lock goes on with the next one":                 {[]func(*History){goesOn}, true},
		"the next one is first under the later token":        {[]func(*History){overtaken}, true},
		"the next one is first, and it is not called at all": {[]func(*History){overtaken, withoutItsTurn}, false},
		"the lock goes on after an error that was recorded": {[]func(*History){goesOn, func(h *History) {
			callOf(h, 160).Answer = "error"
			h.Setbacks = append(h.Setbacks, Setback{Seq: 505, Entry: 81, Queue: "plain", Token: 160})
		}}, false},
		"the next one is first after an error that was recorded": {[]func(*History){overtaken, func(h *History) {
			h.Setbacks = append(h.Setbacks, Setback{Seq: 505, Entry: 81, Queue: "plain", Token: 160})
		}}, false},
		"the next one is first after the death of the node": {[]func(*History){overtaken, func(h *History) {
			callOf(h, 160).Answer = "none"
			h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(11_012), Killed: true})
		}}, true},
		"the next one is first after an answer that was not recorded": {[]func(*History){overtaken, func(h *History) {
			callOf(h, 160).Answer = "ok"
		}}, true},
		"the lock goes on, and the node dies": {[]func(*History){goesOn, func(h *History) {
			h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(11_025), Killed: true})
		}}, false},
		"the lock goes on after an answer that was not recorded": {[]func(*History){goesOn, func(h *History) {
			callOf(h, 160).Answer = "ok"
		}}, false},
		"the next one is first, and it had ended by then": {[]func(*History){overtaken, withoutItsTurn, func(h *History) {
			endOf(h, 81).Seq, endOf(h, 81).Token = 505, 0
		}}, false},
		"the next one is first, and it ends later": {[]func(*History){overtaken, withoutItsTurn, func(h *History) {
			endOf(h, 81).Token = 0
		}}, true},
		"a node that has lost the lock goes on": {[]func(*History){func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 490, Queue: "plain", Key: "r", Token: 159, Last: 82, Process: "n2", At: at(10_000)})
			h.Calls = append(h.Calls, Call{Entry: 82, Token: 159, Op: 82, Begin: at(11_100), Closed: at(11_110), Answer: "ok"})
		}}, false},
		"pushes without an order": {[]func(*History){overtaken, func(h *History) { pushOf(h, 82).Called = at(3) }}, false},
		"it has a deadline":       {[]func(*History){overtaken, func(h *History) { pushOf(h, 81).FinishBy = at(60_000) }}, false},
		"it is to be cancelled":   {[]func(*History){overtaken, func(h *History) { pushOf(h, 81).Cancel = &Cancel{} }}, false},
		"a time with two primaries": {[]func(*History){overtaken, func(h *History) {
			h.Forked[0], h.Forked[1] = at(11_005), at(11_100)
		}}, false},
	} {
		h := good()
		handedBack(h)
		for _, change := range c.changes {
			change(h)
		}
		var r report
		x := newIndex(h)
		for key, starts := range x.keyStarts() {
			x.rerunsInOrder(key, starts, &r)
		}
		if found := len(r.found) > 0; found != c.broken {
			t.Errorf("%s: reported %v, want %v: %q", name, found, c.broken, r.found)
		}
	}
	h := good()
	handedBack(h)
	goesOn(h)
	if broken(h)[inOrder] == 0 {
		t.Error("the promise about order does not ask for it")
	}
}

// What never ran and ended otherwise than done need not have started, whatever its client asked for.
func TestWhatEndedWithoutARunHasNoOrder(t *testing.T) {
	for outcome, want := range map[string]bool{"expired": false, "cancelled": false, "failed": false, "done": true} {
		h := good()
		h.Calls = h.Calls[1:]
		h.Endings[0].Outcome = outcome
		if got := broken(h)[inOrder] > 0; got != want {
			t.Errorf("%s: reported %v, want %v", outcome, got, want)
		}
	}
	h := good()
	h.Calls, h.Endings = h.Calls[1:], h.Endings[1:]
	if broken(h)[inOrder] == 0 {
		t.Error("an entry without an outcome is not reported")
	}
}

// An entry of a key that a lock covers waits for those before it; one that is not covered expires as a solo one does.
func TestDeadlinesOfAKeyBindWhereNoLockCoversTheEntry(t *testing.T) {
	covered := Grant{Seq: 45, Queue: "frail", Key: "f", Token: 170, Last: 60, Process: "n3", At: at(50), Freed: at(5200)}
	for name, c := range map[string]struct {
		change func(g *Grant)
		broken bool
	}{
		"covered": {func(*Grant) {}, false},
		"covered by one that was freed before it came": {func(g *Grant) { g.Freed = at(5) }, true},
		"pushed when the lock was taken":               {func(g *Grant) { g.Last = 50 }, true},
		"another key is locked":                        {func(g *Grant) { g.Key = "g" }, true},
		"covered by a lock that is never freed":        {func(g *Grant) { g.Freed = time.Time{} }, false},
	} {
		h := good()
		pushOf(h, 51).Key, endOf(h, 51).Key, endOf(h, 51).At = "f", "f", at(5300)
		g := covered
		c.change(&g)
		h.Grants = append(h.Grants, g)
		if got := broken(h)[deadlines] > 0; got != c.broken {
			t.Errorf("%s: reported %v, want %v", name, got, c.broken)
		}
	}
}
