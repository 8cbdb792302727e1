package judge

import (
	"slices"
	"testing"
	"time"
)

// A node that is stopped for less than half a lease, just before the timeout of a long run, takes the answer for a
// timeout. Nothing keeps it from recording endings.
func TestAShortStopMakesAnAnswerATimeoutAndExcusesNothingElse(t *testing.T) {
	const attempts, once = "attempts are errors", "an entry that was answered well runs once"
	h := good()
	h.Endings[0].Attempt, callOf(h, 101).Closed = 1, at(30+7010)
	h.Stops = []Death{{Process: "n1", At: at(30 + 6900), Until: at(30 + 8100)}}
	if found := broken(h); found[attempts] != 0 {
		t.Error("the timeout of a node that was stopped for 1.2 s is reported")
	}
	h.Stops[0].Until = at(30 + 7800)
	if found := broken(h); found[attempts] == 0 {
		t.Error("an attempt without an error is not reported: the node went on before its timeout")
	}
	h.Stops[0] = Death{Process: "n2", At: at(30 + 6900), Until: at(30 + 8100)}
	if found := broken(h); found[attempts] == 0 {
		t.Error("the stop of another node makes an answer a timeout")
	}
	h = good()
	h.Stops = []Death{{Process: "n3", At: at(10_005), Until: at(10_905)}}
	h.Calls = append(h.Calls,
		Call{Entry: 54, Token: 130, Op: 54, Begin: at(10_000), Closed: at(10_010), Answer: "ok"},
		Call{Entry: 54, Token: 131, Op: 54, Begin: at(11_500), Closed: at(11_510), Answer: "ok"})
	h.Grants = append(h.Grants,
		Grant{Seq: 401, Queue: "frail", Key: "#54", Token: 130, Last: 54, Process: "n3", At: at(9990)},
		Grant{Seq: 402, Queue: "frail", Key: "#54", Token: 131, Last: 54, Process: "n2", At: at(11_490)})
	if found := broken(h); found[once] == 0 {
		t.Error("a stop for less than half a lease excuses a second run")
	}
}

// The death of a node that had told of a run is a crash: an attempt for it is one too many. A node that records an
// error just before its death may do so in a transaction that waits for a row until long after it.
func TestTheDeathOfANodeThatToldOfARunIsNoAttempt(t *testing.T) {
	const attempts, crashes = "attempts are errors", "crashes are deaths of nodes that had it"
	for name, c := range map[string]struct {
		change            func(h *History)
		attempts, crashes bool // is reported
	}{
		"a crash":                {func(h *History) { endOf(h, 54).Crashes = 1 }, false, false},
		"an attempt":             {func(h *History) { endOf(h, 54).Attempt = 1 }, true, true},
		"an attempt and a crash": {func(h *History) { endOf(h, 54).Attempt, endOf(h, 54).Crashes = 1, 1 }, true, false},
		"an attempt, and the node had told of it once": {func(h *History) {
			callOf(h, 123).Begin, endOf(h, 54).Attempt = at(1950), 1
		}, false, false},
		"an error that the node records in a transaction which waits for 3 s": {func(h *History) {
			endOf(h, 54).Attempt, grantOf(h, 123).FreeBegan = 1, at(2590)
		}, false, false},
		"an error that the node records over a slow connection, and then waits": {func(h *History) {
			endOf(h, 54).Attempt, grantOf(h, 123).FreeBegan = 1, at(3250)
			h.Away = []Death{{Process: "n3", At: at(2000), Until: at(4000)}}
		}, false, false},
		"an error, and the attempt of it": {func(h *History) {
			endOf(h, 54).Attempt, callOf(h, 123).Answer = 1, "error"
		}, false, false},
		"a server whose clock jumped": {func(h *History) { endOf(h, 54).Attempt, h.ClockJumped = 1, true }, false, false},
	} {
		h := good()
		killN3(h)
		c.change(h)
		found := broken(h)
		if found[attempts] > 0 != c.attempts || found[crashes] > 0 != c.crashes {
			t.Errorf("%s: %q is reported: %v, want %v; %q: %v, want %v", name, attempts, found[attempts] > 0, c.attempts,
				crashes, found[crashes] > 0, c.crashes)
		}
	}
}

// An answer is noted before it is sent: a call that follows from it begins later. How late the end of a connection is
// seen excuses only a call that the node gave up.
func TestShortRunsOfAKeyOverlapAsLongOnesDo(t *testing.T) {
	const promise = "no overlap without silence beyond the lease"
	for name, c := range map[string]struct {
		change func(h *History)
		broken bool
	}{
		"80 ms on one node":     {func(*History) {}, true},
		"80 ms on two nodes":    {func(h *History) { grantOf(h, 102).Process = "n2" }, true},
		"80 ms under one token": {func(h *History) { callOf(h, 102).Token = 101 }, true},
		"40 ms":                 {func(h *History) { callOf(h, 101).Closed = at(90) }, false},
		"80 ms after an error":  {func(h *History) { callOf(h, 101).Answer = "error" }, true},
		"80 ms after a call that the worker broke off": {func(h *History) { callOf(h, 101).Answer = "died" }, true},
		"80 ms after a call that the node gave up":     {func(h *History) { callOf(h, 101).Answer = "none" }, false},
		"110 ms after a call that the node gave up": {func(h *History) {
			callOf(h, 101).Answer, callOf(h, 101).Closed = "none", at(161)
		}, true},
		"80 ms after the timeout of the node": {func(h *History) { h.RunMax = 150 * time.Millisecond }, false},
		"80 ms, and the node drains": {func(h *History) {
			h.Hindrances = []Death{{Process: "n1", At: at(-2900)}}
		}, false},
		"80 ms, and another node drains": {func(h *History) {
			h.Hindrances = []Death{{Process: "n2", At: at(45)}}
		}, true},
		"80 ms, and the node drains later": {func(h *History) {
			h.Hindrances = []Death{{Process: "n1", At: at(151)}}
		}, true},
	} {
		h := good()
		callOf(h, 101).Closed = at(130)
		c.change(h)
		if found := broken(h)[promise] > 0; found != c.broken {
			t.Errorf("%s: reported %v, want %v", name, found, c.broken)
		}
	}
}

// A node whose locks were taken after its lease may be heard again before the next run begins, and go on for a while.
func TestANodeThatIsHeardAgainAfterItsLocksWereTakenExcusesAnOverlap(t *testing.T) {
	const promise = "no overlap without silence beyond the lease"
	for name, c := range map[string]struct {
		heard  int
		change func(h *History)
		broken bool
	}{
		"after the locks were taken":              {4990, func(*History) {}, false},
		"before the locks were taken":             {4000, func(*History) {}, true},
		"while recovery waited for a table":       {4970, func(h *History) { grantOf(h, 104).FreeBegan = at(4900) }, false},
		"before its lock was freed, by itself":    {4970, func(*History) {}, true},
		"again, and its lock was never freed":     {4990, func(h *History) { grantOf(h, 104).Freed = time.Time{} }, true},
		"again, and its lock is freed afterwards": {4990, func(h *History) { grantOf(h, 104).Freed = at(9500) }, true},
	} {
		h := good()
		h.Beats = append(h.Beats, Beat{Process: "n1", At: at(c.heard)})
		callOf(h, 104).Closed, callOf(h, 104).Answer = at(6000), "ok"
		c.change(h)
		if found := broken(h)[promise] > 0; found != c.broken {
			t.Errorf("heard %s: reported %v, want %v", name, found, c.broken)
		}
	}
}

// A call counts as a case where the one before it went on for longer than what is tolerated.
func TestCasesOfOverlapsAreCallsAfterOneThatCouldBeSeen(t *testing.T) {
	for want, change := range map[int]func(h *History){
		2: func(*History) {}, // 90 ms of entry 53, and 9 s of entry 13
		3: func(h *History) { callOf(h, 101).Begin = at(-20) },
		1: func(h *History) { callOf(h, 121).Answer = "none" },
	} {
		h := good()
		change(h)
		var r report
		noOverlap(newIndex(h), &r)
		if r.checked != want || len(r.found) > 0 {
			t.Errorf("%d cases, want %d; %q", r.checked, want, r.found)
		}
	}
}

func TestACallIsUnderALockOfTheKeyThatItsClientNamed(t *testing.T) {
	const promise = "a call carries a committed token"
	judgeEach(t, []seen{
		{"a call under a token of another key", promise, func(h *History) { grantOf(h, 102).Key = "l" }},
		{"a call of a keyed entry under a lock of its own", promise, func(h *History) { grantOf(h, 102).Key = "#12" }},
		{"a call of a solo entry under a lock of a key", promise, func(h *History) { grantOf(h, 106).Key = "k" }},
		{"a call of a keyed entry whose client was not told, under another key", promise, func(h *History) {
			pushOf(h, 12).Told, pushOf(h, 12).Entry, grantOf(h, 102).Key = false, 0, "l"
		}},
		{"a call of no client's entry under the lock of another", promise, func(h *History) {
			callOf(h, 106).Op, grantOf(h, 106).Key = 0, "#17"
		}},
	})
	for name, change := range map[string]func(h *History){
		"a keyed entry that no client pushed": func(h *History) { callOf(h, 102).Op, grantOf(h, 102).Key = 0, "l" },
		"a solo entry that no client pushed":  func(h *History) { callOf(h, 106).Op = 0 },
		"an entry whose push is left out": func(h *History) {
			h.Pushes = slices.DeleteFunc(h.Pushes, func(p Push) bool { return p.Op == 2 })
		},
	} {
		h := good()
		change(h)
		if broken(h)[promise] > 0 {
			t.Errorf("%s is reported", name)
		}
	}
}

// crashOfAKey lets n3 be killed while it runs the first of two entries of a key. Its lock is freed after its lease, and
// n2 runs both.
func crashOfAKey(h *History) {
	killN3(h)
	endOf(h, 54).Crashes = 1
	h.Grants = append(h.Grants,
		Grant{Seq: 401, Queue: "keyed", Key: "m", Token: 150, Last: 72, Process: "n3", At: at(1000), Freed: at(5700), FreedSeq: 410, FreeBegan: at(5690)},
		Grant{Seq: 411, Queue: "keyed", Key: "m", Token: 151, Last: 73, Process: "n2", At: at(5800), Freed: at(6100), FreedSeq: 420, FreeBegan: at(6100)})
	h.Calls = append(h.Calls,
		Call{Entry: 71, Token: 150, Op: 71, Begin: at(1010), Closed: at(2610), Answer: "none"},
		Call{Entry: 71, Token: 151, Op: 71, Begin: at(5810), Closed: at(5820), Answer: "ok"},
		Call{Entry: 72, Token: 151, Op: 72, Begin: at(5910), Closed: at(5920), Answer: "ok"})
	for i, entry := range []int64{71, 72, 73} {
		h.Endings = append(h.Endings, Ending{
			Seq: int64(415 + i), Entry: entry, Queue: "keyed", Key: "m", Outcome: "done", Token: 151,
		})
	}
}

// A crash under a lock of a key may count for a neighbour of the entry that ran, but not for none.
func TestACrashUnderALockOfAKeyCountsForAnEntryOfTheKey(t *testing.T) {
	const promise = "crashes are deaths of nodes that had it"
	for name, c := range map[string]struct {
		change func(h *History)
		broken bool
	}{
		"it counts for none":                    {func(*History) {}, true},
		"it counts for the entry that ran":      {func(h *History) { endOf(h, 71).Crashes = 1 }, false},
		"it counts for the entry behind":        {func(h *History) { endOf(h, 72).Crashes = 1 }, false},
		"it counts for one that is not covered": {func(h *History) { endOf(h, 73).Crashes = 1 }, true},
		"it counts for one that had ended": {func(h *History) {
			endOf(h, 72).Crashes, endOf(h, 72).Token, endOf(h, 72).Seq = 1, 150, 402
		}, true},
		"the node had told of it once":         {func(h *History) { callOf(h, 150).Begin = at(1950) }, false},
		"the worker had answered":              {func(h *History) { callOf(h, 150).Answer = "ok" }, false},
		"the ending of the entry was recorded": {func(h *History) { endOf(h, 71).Token, endOf(h, 71).Seq = 150, 402 }, false},
		"the node ended the lock in a transaction that waited for 3 s": {func(h *History) {
			grantOf(h, 150).FreeBegan = at(2590)
		}, false},
		"the node was stopped": {func(h *History) { h.Deaths[len(h.Deaths)-1].Killed = false }, false},
		"a second lock, and one crash": {func(h *History) {
			endOf(h, 71).Crashes = 1
			h.Grants = append(h.Grants, Grant{Seq: 400, Queue: "keyed", Key: "m", Token: 149, Last: 73, Process: "n3", At: at(1000), Freed: at(5700), FreedSeq: 409, FreeBegan: at(5690)})
			h.Calls = append(h.Calls, Call{Entry: 73, Token: 149, Op: 73, Begin: at(1010), Closed: at(2610), Answer: "none"})
		}, true},
	} {
		h := good()
		crashOfAKey(h)
		c.change(h)
		if found := broken(h)[promise] > 0; found != c.broken {
			t.Errorf("%s: reported %v, want %v", name, found, c.broken)
		}
	}
}
