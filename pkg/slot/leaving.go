package slot

import "time"

// Leaving has the slots of one model that have left their ledgers and are the node's by the database still, which is
// to be told: they go back to it or to other nodes, or are in doubt. No answer of the database brings one back under
// its token, so that a slot that leaves gets no call. It is in memory and pure: callers serialise. The zero value is
// empty.
//
// A statement about such slots without an answer may be carried out at any later time: they are named again in the next
// one. Under the same tokens that changes nothing where they are gone.
type Leaving struct {
	told   map[Held]time.Time // since when the database knows; zero: it has not been told
	back   []Held             // to go back with the next statement
	doubts []Doubt            // to be put in doubt with the next statement
}

// Note takes slots in about which a statement begins. GaveBack or Keep follows.
func (l *Leaving) Note(slots ...Held) {
	if l.told == nil {
		l.told = map[Held]time.Time{}
	}
	for _, s := range slots {
		l.told[s] = time.Time{}
	}
}

// GiveBack takes slots in that go back.
func (l *Leaving) GiveBack(slots ...Held) {
	l.Note(slots...)
	l.back = append(l.back, slots...)
}

// Doubt takes slots in whose calls may still run.
func (l *Leaving) Doubt(doubts ...Doubt) {
	for _, d := range doubts {
		l.Note(d.Held)
	}
	l.doubts = append(l.doubts, doubts...)
}

// TakeBack returns the slots that go back, for a statement. GaveBack follows.
func (l *Leaving) TakeBack() []Held {
	back := l.back
	l.back = nil
	return back
}

// TakeDoubts returns the slots that are to be put in doubt, for a statement. Doubted follows.
func (l *Leaving) TakeDoubts() []Doubt {
	doubts := l.doubts
	l.doubts = nil
	return doubts
}

// Back counts the slots that go back and of which no statement has been sent.
func (l *Leaving) Back() int { return len(l.back) }

// Doubts lists the slots that are to be put in doubt and of which no statement has been sent.
func (l *Leaving) Doubts() []Doubt { return l.doubts }

// Due says whether the database is to be told of any.
func (l *Leaving) Due() bool { return len(l.back)+len(l.doubts) > 0 }

// GaveBack notes whether the database has answered the statement by which slots went back. Without an answer they go
// back once more, with the next one.
func (l *Leaving) GaveBack(now time.Time, answered bool, slots ...Held) {
	if !answered {
		l.GiveBack(slots...)
		return
	}
	for _, s := range slots {
		l.tell(now, s)
	}
}

// Doubted is GaveBack for the statement that put slots in doubt.
func (l *Leaving) Doubted(now time.Time, answered bool, doubts ...Doubt) {
	if !answered {
		l.Doubt(doubts...)
		return
	}
	for _, d := range doubts {
		l.tell(now, d.Held)
	}
}

// tell notes that the database knows of a slot.
func (l *Leaving) tell(now time.Time, s Held) {
	if _, leaves := l.told[s]; leaves {
		l.told[s] = now
	}
}

// Keep drops slots that stay the node's, and that go back into their ledger.
func (l *Leaving) Keep(slots ...Held) {
	for _, s := range slots {
		delete(l.told, s)
	}
}

// Empty says whether no slot leaves or has left.
func (l *Leaving) Empty() bool { return len(l.told) == 0 && !l.Due() }

// Has says whether a slot leaves or has left.
func (l *Leaving) Has(s Held) bool {
	_, leaves := l.told[s]
	return leaves
}

// Without returns those of some slots that do not leave: an answer of the database may be older than their leaving.
func (l *Leaving) Without(slots []Held) (rest []Held) {
	for _, s := range slots {
		if !l.Has(s) {
			rest = append(rest, s)
		}
	}
	return rest
}

// ForgetBefore drops what the database knew before it is asked which slots are the node's: its answer does not have
// these.
func (l *Leaving) ForgetBefore(asked time.Time) {
	for s, at := range l.told {
		if !at.IsZero() && at.Before(asked) {
			delete(l.told, s)
		}
	}
}
