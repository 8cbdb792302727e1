package judge

import "testing"

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
