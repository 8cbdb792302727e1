package main

import (
	"fmt"

	"github.com/penstock/penstock/chaos/judge"
)

// doubtfulSQL lists the slots that are in doubt.
const doubtfulSQL = `
SELECT 'a slot of instance ' || s.instance_id || ' of ' || i.model || ' is in doubt: ' || s.doubt
  FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
 WHERE s.doubt_at IS NOT NULL`

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
