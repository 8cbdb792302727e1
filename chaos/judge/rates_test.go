package judge

import (
	"fmt"
	"testing"
)

// started is a history of starts at these times (ms), each of which ended under its grant, at a rate of three a second
// and two at once.
func started(times ...int) *History {
	h := &History{Rates: map[string]Rate{"rated": {Burst: 2, PerSecond: 3}}}
	for i, ms := range times {
		token := int64(i + 1)
		h.Grants = append(h.Grants, Grant{Seq: token, Queue: "rated", Key: fmt.Sprintf("#%d", token), Token: token, Last: token, At: at(ms)})
		h.Calls = append(h.Calls, Call{Entry: token, Token: token, Queue: "rated", Begin: at(ms), Closed: at(ms), Answer: "ok"})
		h.Endings = append(h.Endings, Ending{Seq: 100 + token, Entry: token, Token: token, Outcome: "done"})
	}
	return h
}

func TestRatesAreJudgedByTheServersClock(t *testing.T) {
	slow := []Disturbance{{"slow", at(0), at(950)}}
	for name, c := range map[string]struct {
		h               *History
		spoil           func(h *History)
		checked, broken int
	}{
		"as many as there may be":                  {started(1000, 1000, 1334, 1667, 2000), func(*History) {}, 5, 0},
		"one more at once":                         {started(1000, 1000, 1000, 1334), func(*History) {}, 4, 0},
		"two more at once":                         {started(1000, 1000, 1000, 1000), func(*History) {}, 4, 1},
		"two more within a third of a second":      {started(1000, 1000, 1000, 1230), func(*History) {}, 4, 1},
		"the first ones recorded 400 ms late":      {started(1400, 1400, 1400, 1667, 2000), func(*History) {}, 5, 0},
		"whatever the harness sees late":           {started(1000, 1000, 1000, 1000), func(h *History) { h.Tolerance = 1e9 }, 4, 1},
		"recorded just after the server was slow":  {started(1000, 1000, 1000, 1000), func(h *History) { h.Refusals = slow }, 0, 0},
		"recorded some time after it was slow":     {started(1050, 1050, 1050, 1050), func(h *History) { h.Refusals = slow }, 4, 1},
		"a start whose entry did not end under it": {started(1000, 1000, 1000, 1000), func(h *History) { h.Endings[3].Token = 0 }, 3, 0},
		"a worker that refused":                    {started(1000, 1000, 1000, 1000), func(h *History) { h.Calls[3].Answer = "busy" }, 3, 0},
		"two calls of one run":                     {started(1000, 1000, 1000), func(h *History) { h.Calls = append(h.Calls, h.Calls[0]) }, 3, 0},
		"a server whose clock jumped":              {started(1000, 1000, 1000, 1000), func(h *History) { h.ClockJumped = true }, 0, 0},
		"another queue":                            {started(1000, 1000, 1000, 1000), func(h *History) { h.Grants[0].Queue = "solo" }, 3, 0},
	} {
		c.spoil(c.h)
		var r report
		ratesHold(newIndex(c.h), &r)
		if r.checked != c.checked || len(r.found) != c.broken {
			t.Errorf("%s: %d cases, want %d; %d reports, want %d: %q", name, r.checked, c.checked, len(r.found), c.broken, r.found)
		}
	}
}
