package main

import (
	"fmt"

	"github.com/penstock/penstock/chaos/judge"
)

// doubtfulSQL lists the slots that no call can use: those in doubt, and those of nodes that died; and, if $1 is true,
// those of task nodes, which keep none for longer than a second once nothing is left to do.
const doubtfulSQL = `
SELECT 'a slot of instance ' || s.instance_id || ' of ' || i.model
       || CASE WHEN s.doubt_at IS NOT NULL THEN ' is in doubt: ' || s.doubt
               WHEN penstock.node_lives(s.node_id) THEN ' is held, and nothing runs, by node ' || s.node_id
               ELSE ' is of node ' || s.node_id || ', which died' END
  FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
 WHERE $1::boolean AND NOT penstock.node_online(s.node_id)
    OR s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)`

// doubtsOf are the times for which slots were in doubt.
func doubtsOf(events []event) (doubts []judge.Doubt) {
	open := map[int64]int{} // by token
	for _, e := range events {
		switch e.What {
		case "doubt":
			open[e.Token] = len(doubts)
			doubts = append(doubts, judge.Doubt{
				Slot: e.Key, Token: e.Token, Entry: e.Entry, Reason: e.Class, From: e.At,
			})
		case "certain":
			if i, known := open[e.Token]; known {
				doubts[i].To = e.At
			}
		}
	}
	return doubts
}

// doubtsAfter are the times for which slots were in doubt once the faults were over, a line for each.
func doubtsAfter(h *judge.History) (text []byte) {
	for _, d := range h.Doubts {
		if d.To.IsZero() || d.To.After(h.FaultsOver) {
			text = fmt.Appendf(text, "slot %s, token %d, entry %d from %v to %v, %v after the faults: %s\n", d.Slot,
				d.Token, d.Entry, d.From.UTC(), d.To.UTC(), d.To.Sub(h.FaultsOver), d.Reason)
		}
	}
	return text
}
