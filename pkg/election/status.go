package election

import "time"

// Status is what a process knows of its election: for metrics and people.
type Status struct {
	Leading bool          // this process was elected and trusts it
	Term    Term          // the newest term seen
	Holder  string        // who holds it; empty if nobody does
	Age     time.Duration // since this process first saw the term
	Changes int64         // terms of this election so far, over all processes
	SeenAgo time.Duration // since the row was last read or renewed; large when the database is away

	termSeen, lookedAt time.Time
}

// Status is safe to call at any time.
func (e *Elector) Status() Status {
	s := *e.status.Load()
	if !s.termSeen.IsZero() {
		s.Age = time.Since(s.termSeen)
	}
	if !s.lookedAt.IsZero() {
		s.SeenAgo = time.Since(s.lookedAt)
	}
	return s
}

// see notes what a look found. Only Run's goroutine writes the status.
func (e *Elector) see(found seen, err error) {
	if err != nil || found.term == 0 {
		return
	}
	s := *e.status.Load()
	if s.Term != found.term {
		s.termSeen = time.Now()
	}
	s.Leading, s.Term, s.Changes, s.lookedAt = found.won, found.term, found.changes, time.Now()
	s.Holder = ""
	if found.held {
		s.Holder = found.holder
	}
	e.status.Store(&s)
}

func (e *Elector) seeRenewed() {
	s := *e.status.Load()
	s.lookedAt = time.Now()
	e.status.Store(&s)
}

// standDown notes that the term is over.
func (e *Elector) standDown() {
	s := *e.status.Load()
	s.Leading, s.Holder = false, ""
	e.status.Store(&s)
}
