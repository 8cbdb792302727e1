package inference

import (
	"cmp"
	"slices"
	"time"
)

// HeldSlot is a slot as the registry sees it.
type HeldSlot struct {
	ID      string
	HeldFor time.Duration // by the database's clock
	Alive   bool          // a live node answers for it: it has the connection open, or follows the run
}

// StaleSlots returns the slots that the worker does not account for: active is
// the number of calls that it reported.
//
// A slot younger than grace is never stale. Between the moment when a node
// takes a slot and the moment when the worker counts the call there is a
// request on its way, and a probe that overtakes it would free a slot in use.
// Such slots do not use up the report either: a call on its way is not in it.
// Of the others the oldest go first, and only as many as the report leaves
// unexplained: which slot an anonymous count belongs to cannot be known, but
// how many are in use can.
func StaleSlots(held []HeldSlot, active int, grace time.Duration) []string {
	settled := slices.DeleteFunc(slices.Clone(held), func(s HeldSlot) bool { return s.HeldFor < grace })
	unexplained := len(settled) - max(active, 0)
	byAge := slices.SortedFunc(slices.Values(settled), func(a, b HeldSlot) int {
		return cmp.Or(cmp.Compare(b.HeldFor, a.HeldFor), cmp.Compare(a.ID, b.ID))
	})
	var stale []string
	for _, slot := range byAge {
		if len(stale) >= unexplained {
			break
		}
		if !slot.Alive {
			stale = append(stale, slot.ID)
		}
	}
	return stale
}
