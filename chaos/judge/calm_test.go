package judge

import (
	"slices"
	"testing"
	"time"
)

const deadlines, dueInLine = "an entry expires at its deadline", "a due entry comes in line"

// What keeps recovery from its work keeps the other duties of a leader from theirs: the pass over due entries is 5 s
// after an election.
func TestTroubleOfALeaderIsNoCalmTime(t *testing.T) {
	late := func(h *History) { h.Places[5].At = at(5300) }
	for name, c := range map[string]struct {
		spoil  func(h *History)
		broken bool
	}{
		"nothing": {late, true},
		"an error at a statement of another duty": {func(h *History) {
			late(h)
			h.LeaderErrors = []Disturbance{{"error", at(3000), at(4000)}}
		}, false},
		"an error after it came in line": {func(h *History) {
			late(h)
			h.LeaderErrors = []Disturbance{{"error", at(5300), at(6300)}}
		}, true},
		"no node was heard": {func(h *History) {
			late(h)
			h.Beats = slices.DeleteFunc(h.Beats, func(b Beat) bool { return b.At.After(at(1000)) && b.At.Before(at(4000)) })
		}, false},
		"one of two nodes was not heard": {func(h *History) {
			late(h)
			h.Beats = slices.DeleteFunc(h.Beats, func(b Beat) bool {
				return b.Process == "n2" && b.At.After(at(1000)) && b.At.Before(at(4000))
			})
		}, true},
		"no node was heard, and much longer": {func(h *History) {
			h.Places[5].At = at(10_000)
			h.Beats = slices.DeleteFunc(h.Beats, func(b Beat) bool { return b.At.After(at(1000)) && b.At.Before(at(4000)) })
		}, true},
	} {
		h := good()
		c.spoil(h)
		if n := broken(h)[dueInLine]; n > 0 != c.broken {
			t.Errorf("%s: %d reports, want some: %v", name, n, c.broken)
		}
	}
}

// A leader that expires nothing has no entry that expired: the entries that it should have ended are the cases.
func TestCasesOfDeadlinesAreEntriesThatWaitAtThem(t *testing.T) {
	for name, c := range map[string]struct {
		spoil           func(h *History)
		checked, broken int
	}{
		"the good record":               {func(*History) {}, 1, 0},
		"none expired until long after": {func(h *History) { endOf(h, 51).Outcome, endOf(h, 51).At = "done", at(5300) }, 1, 1},
		"granted before the deadline": {func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#51", Token: 124, Last: 51, Process: "n3", At: at(90)})
		}, 0, 0},
		"disturbed, so that it could not be late":  {func(h *History) { h.Disturbances = []Disturbance{{"a", at(3000), at(4000)}} }, 0, 0},
		"disturbed, and late without that as well": {func(h *History) { h.Disturbances, endOf(h, 51).At = []Disturbance{{"a", at(3000), at(4000)}}, at(6300) }, 1, 1},
		"errors of the leader after it":            {func(h *History) { h.LeaderErrors = []Disturbance{{"error", at(200), at(1200)}} }, 0, 0},
		"a server whose clock jumped":              {func(h *History) { h.ClockJumped = true }, 0, 0},
	} {
		h := good()
		c.spoil(h)
		var r report
		deadlinesHold(newIndex(h), &r)
		if r.checked != c.checked || len(r.found) != c.broken {
			t.Errorf("%s: %d cases, want %d; %d reports, want %d: %q", name, r.checked, c.checked, len(r.found), c.broken, r.found)
		}
	}
}

func TestATimeIsUndisturbedWhereNothingHappened(t *testing.T) {
	h := &History{LeaderErrors: []Disturbance{{"error", at(3000), at(4000)}}}
	for name, c := range map[string]struct {
		from, to time.Time
		want     bool
	}{
		"before it": {at(1000), at(3000), true}, "after it": {at(4000), at(6000), true},
		"around its begin": {at(2999), at(3001), false}, "within it": {at(3200), at(3300), false},
		"a time that has not begun": {at(6000), at(5000), true},
	} {
		if got := Undisturbed(h, c.from, c.to); got != c.want {
			t.Errorf("%s: undisturbed is %v, want %v", name, got, c.want)
		}
	}
}
