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
