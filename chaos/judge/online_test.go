package judge

import (
	"strings"
	"testing"
	"time"
)

// online is a history of two gateways without a fault: two calls at once on two slots, one answered whole and one refused.
func online() *History {
	return &History{
		Lease: 3 * time.Second, Tolerance: 100 * time.Millisecond, Gateways: 2, GatewayLease: 5 * time.Second,
		Slots: map[string]int{"gpu": 2},
		Beats: []Beat{{Process: "g1", At: at(0)}, {Process: "g1", At: at(2000)}, {Process: "g1", At: at(4000)}, {Process: "g2", At: at(0)}, {Process: "g2", At: at(2000)}, {Process: "g2", At: at(4000)}},
		SlotCalls: []Call{
			{Op: 1, Instance: "gpu", Via: "g1", Begin: at(100), Closed: at(900), Answer: "ok", Nonce: "a"},
			{Op: 2, Instance: "gpu", Via: "g2", Begin: at(200), Closed: at(1200), Answer: "ok", Nonce: "b"},
			{Op: 3, Instance: "gpu", Via: "g2", Begin: at(2000), Closed: at(3000), Answer: "died"},
		},
		Requests: []Request{
			{Op: 1, Process: "g1", Begin: at(90), End: at(910), How: AnsweredWhole, Nonce: "a"},
			{Op: 2, Process: "g2", Begin: at(190), End: at(1210), How: AnsweredWhole, Nonce: "b"},
			{Op: 3, Process: "g2", Begin: at(1990), End: at(3010), How: AnsweredError},
		},
	}
}

func onlineFindings(h *History) (found []string) {
	x := newIndex(h)
	for _, check := range []func(*index, *report){slotsHold, wholeOrError, gatewaysServe} {
		var r report
		check(x, &r)
		found = append(found, r.found...)
	}
	return found
}

func TestJudgesOfGatewaysSeeWhatIsWrong(t *testing.T) {
	if found := onlineFindings(online()); len(found) > 0 {
		t.Fatalf("before anything was changed: %q", found)
	}
	third := Call{Op: 4, Instance: "gpu", Via: "g1", Begin: at(300), Closed: at(800), Answer: "ok"}
	for want, spoil := range map[string]func(*History){
		"gpu had 3 calls on 2 slots": func(h *History) { h.SlotCalls = append(h.SlotCalls, third) },
		"no call for it answered":    func(h *History) { h.Requests[0].Nonce = "b" },
		"answered in part":           func(h *History) { h.Requests[1].How = AnsweredPart },
		"answered not":               func(h *History) { h.Requests[2].How = AnsweredNot },
		"g1 serves no request":       func(h *History) { h.Unserved = []string{"g1 serves no request"} },
	} {
		h := online()
		spoil(h)
		if found := onlineFindings(h); !strings.Contains(strings.Join(found, "\n"), want) {
			t.Errorf("want %q, found %q", want, found)
		}
	}
}

// What a dead gateway leaves unanswered, and the call of one that lost its slots, break no promise.
func TestJudgesOfGatewaysAllowWhatADeathDoes(t *testing.T) {
	h := online()
	h.Requests[1].How, h.Requests[1].Nonce = AnsweredPart, ""
	h.Deaths = []Death{{Process: "g2", At: at(1000), Killed: true}}
	h.Beats = h.Beats[:4] // g2 is silent from 0 on
	h.SlotCalls[1].Closed = at(9000)
	for _, op := range []int64{5, 6} {
		h.SlotCalls = append(h.SlotCalls, Call{Op: op, Instance: "gpu", Via: "g1", Begin: at(6000), Closed: at(6500), Answer: "ok"})
	}
	h.Beats = append(h.Beats, Beat{Process: "g1", At: at(5500)})
	if found := onlineFindings(h); len(found) > 0 {
		t.Errorf("found %q", found)
	}
}
