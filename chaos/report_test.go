package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// A run in which nothing happened, or whose heartbeats were not recorded, keeps every promise and shows nothing.
func TestARunOfAnyLengthHasToShowSomething(t *testing.T) {
	began := time.Now()
	at := func(s int) time.Time { return began.Add(time.Duration(s) * time.Second) }
	run := func() *judge.History {
		return &judge.History{
			Lease:  3 * time.Second,
			Pushes: []judge.Push{{Op: 1, Told: true, Entry: 1}},
			Calls:  []judge.Call{{Entry: 1, Token: 1, Begin: at(1)}, {Entry: 2, Token: 2, Begin: at(5)}},
			Grants: []judge.Grant{{Token: 1, Key: "#1", Process: "n1.1"}, {Token: 2, Key: "#2", Process: "n1.1"}},
			Beats:  []judge.Beat{{Process: "n1.1", At: at(0), Registered: true}, {Process: "n1.1", At: at(2)}},
			Deaths: []judge.Death{{Process: "n1.1", At: at(6), Killed: true}},
		}
	}
	for _, c := range []struct {
		spoil  func(h *judge.History)
		faults bool
		want   string
	}{
		{func(*judge.History) {}, true, ""},
		{func(h *judge.History) { h.Pushes[0].Told = false }, true, "no client was told"},
		{func(h *judge.History) { h.Calls = nil }, true, "no worker was called"},
		{func(h *judge.History) {
			h.Pushes = append(h.Pushes, judge.Push{Queue: "frail", Due: at(9), FinishBy: at(8), Refused: true})
		}, true, "each of the pushes to frail with due_at true, start_by false and finish_by true was refused, 1"},
		{func(h *judge.History) {
			h.Pushes = append(h.Pushes, judge.Push{Queue: "frail", Refused: true}, judge.Push{Queue: "frail", Told: true})
		}, true, ""},
		{func(h *judge.History) { h.Deaths[0].Killed = false }, true, "no program was killed"},
		{func(h *judge.History) { h.Deaths = nil }, false, ""},
		{func(h *judge.History) { h.Beats = h.Beats[:1] }, true, "no heartbeat of n1.1"},
		{func(h *judge.History) { h.Beats = nil }, false, "no heartbeat of n1.1"},
		{func(h *judge.History) { h.Beats, h.Calls[1].Begin = nil, at(2) }, true, ""}, // killed before its first one
	} {
		h := run()
		c.spoil(h)
		list := missingAtAll(h, c.faults)
		if c.want == "" && len(list) > 0 || c.want != "" && !slices.ContainsFunc(list, func(problem string) bool {
			return strings.Contains(problem, c.want)
		}) {
			t.Errorf("%q, want %q", list, c.want)
		}
	}
}
