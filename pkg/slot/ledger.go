package slot

import (
	"iter"
	"maps"
	"slices"
)

// Ledger counts the slots that a node holds of one instance: each is idle, or busy with a call. It is in memory and
// pure: callers serialise. The zero value is empty. C is what a node notes of the call of a slot.
//
//	Held() = Idle() + Busy()
//
// A slot that leaves the ledger is not used again under its token: it was lost, or is with Leaving. A call on it goes
// on, and its end frees nothing, also where the slot has come in again meanwhile.
type Ledger[C any] struct {
	slots map[int32]*Leased[C] // by number
	idle  []*Leased[C]         // the one that was used last at the end
}

// Leased is a slot in a ledger, or one that was.
type Leased[C any] struct {
	Held
	Call C
	busy bool
}

// Busy says whether the slot has a call.
func (s *Leased[C]) Busy() bool { return s.busy }

// Held counts the slots.
func (l *Ledger[C]) Held() int { return len(l.slots) }

// Idle counts the slots without a call.
func (l *Ledger[C]) Idle() int { return len(l.idle) }

// Busy counts the slots with a call. Calls whose slots were dropped are not among them.
func (l *Ledger[C]) Busy() int { return len(l.slots) - len(l.idle) }

// All lists the slots. The one that it is at may be dropped.
func (l *Ledger[C]) All() iter.Seq[*Leased[C]] { return maps.Values(l.slots) }

// IdleSlots lists the slots without a call, the one that was used last at the end. None may be taken out meanwhile.
func (l *Ledger[C]) IdleSlots() iter.Seq[*Leased[C]] { return slices.Values(l.idle) }

// Has says whether a slot is in the ledger still.
func (l *Ledger[C]) Has(s *Leased[C]) bool { return s != nil && l.slots[s.Number] == s }

// Find returns a slot by its number and token, nil if the ledger does not have it.
func (l *Ledger[C]) Find(s Held) *Leased[C] {
	if found := l.slots[s.Number]; found != nil && found.Held == s {
		return found
	}
	return nil
}

// Numbered returns the slot of a number, nil if the ledger does not have it.
func (l *Ledger[C]) Numbered(number int32) *Leased[C] { return l.slots[number] }

// Add takes in a slot that the database gave to the node: it is idle. A number has one holder at a time, and a
// later one a greater token: a slot of the number under a lesser token is dropped. Where the ledger has the token
// or a greater one, the answer was long on its way: nothing changes, and nil is returned.
func (l *Ledger[C]) Add(s Held) *Leased[C] {
	if old := l.slots[s.Number]; old != nil {
		if old.Token >= s.Token {
			return nil
		}
		l.Drop(old)
	}
	if l.slots == nil {
		l.slots = map[int32]*Leased[C]{}
	}
	added := &Leased[C]{Held: s}
	l.slots[s.Number] = added
	l.idle = append(l.idle, added)
	return added
}

// Last returns the idle slot that was used last, nil if none is idle.
func (l *Ledger[C]) Last() *Leased[C] {
	if len(l.idle) == 0 {
		return nil
	}
	return l.idle[len(l.idle)-1]
}

// First returns the idle slot that has not been used for longest, nil if none is idle.
func (l *Ledger[C]) First() *Leased[C] {
	if len(l.idle) == 0 {
		return nil
	}
	return l.idle[0]
}

// Occupy makes an idle slot busy.
func (l *Ledger[C]) Occupy(s *Leased[C]) {
	l.unidle(s)
	s.busy = true
}

// Free ends the call of a busy slot: it is idle again. It is false if the ledger does not have the slot any more.
func (l *Ledger[C]) Free(s *Leased[C]) bool {
	if !l.Has(s) || !s.busy {
		return false
	}
	s.busy = false
	l.idle = append(l.idle, s)
	return true
}

// Drop takes a slot out. It is false if the ledger does not have it any more.
func (l *Ledger[C]) Drop(s *Leased[C]) bool {
	if !l.Has(s) {
		return false
	}
	delete(l.slots, s.Number)
	if !s.busy {
		l.unidle(s)
	}
	return true
}

// unidle takes a slot out of the idle ones. It is mostly the last.
func (l *Ledger[C]) unidle(s *Leased[C]) {
	for i := len(l.idle) - 1; i >= 0; i-- {
		if l.idle[i] == s {
			copy(l.idle[i:], l.idle[i+1:])
			l.idle[len(l.idle)-1] = nil
			l.idle = l.idle[:len(l.idle)-1]
			return
		}
	}
}
