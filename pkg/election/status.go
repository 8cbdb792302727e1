package election

import "time"

// Status is the state of the election as a process knows it, for metrics and status output.
type Status struct {
	Leading bool          // this process was elected, and its trust window is open
	Term    Term          // the newest term seen
	Holder  string        // the holder's name; empty if the term is not held
	Age     time.Duration // since this process first saw the term
	Changes int64         // terms of this election so far, over all processes
	SeenAgo time.Duration // since the row was last read or renewed; large when the database is away

	termSeen, polledAt, trustedUntil time.Time
}

// Status is safe to call at any time.
func (e *Elector) Status() Status {
	s := *e.status.Load()
	s.Leading = s.Leading && time.Now().Before(s.trustedUntil) // what ends the term may come late
	if !s.termSeen.IsZero() {
		s.Age = time.Since(s.termSeen)
	}
	if !s.polledAt.IsZero() {
		s.SeenAgo = time.Since(s.polledAt)
	}
	return s
}

// see records the result of a poll that began at start. Only Run's goroutine writes the status.
func (e *Elector) see(start time.Time, found seen, err error) {
	if err != nil || found.term == 0 {
		return
	}
	s := *e.status.Load()
	if s.Term != found.term {
		s.termSeen = time.Now()
	}
	s.Leading, s.Term, s.Changes, s.polledAt = found.won, found.term, found.changes, time.Now()
	s.trustedUntil = start.Add(e.cfg.trust())
	s.Holder = ""
	if found.held {
		s.Holder = found.holder
	}
	e.status.Store(&s)
}

// seeRenewed records a renewal that began at start.
func (e *Elector) seeRenewed(start time.Time) {
	s := *e.status.Load()
	s.polledAt, s.trustedUntil = time.Now(), start.Add(e.cfg.trust())
	e.status.Store(&s)
}

// endTerm records that the term is over.
func (e *Elector) endTerm() {
	s := *e.status.Load()
	s.Leading, s.Holder = false, ""
	e.status.Store(&s)
}
