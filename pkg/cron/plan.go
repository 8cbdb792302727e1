package cron

import "time"

// Overlap is the policy for a nominal time that comes while the run before it goes on.
type Overlap string

// The policies for overlap. Under each of them a job has one entry, so two runs of a job never
// overlap.
const (
	OverlapSkip Overlap = "skip" // that nominal time is dropped
	// it fires when the run has ended; of several, those that the catch-up policy names
	OverlapQueue  Overlap = "queue"
	OverlapCancel Overlap = "cancel_running" // the run is cancelled; then it fires
)

// memory is the state of a job between two firings.
type memory struct {
	handled      time.Time // nominal times up to this one were fired or dropped
	catchingUpTo time.Time // the last of several missed ones that are fired one after another; zero if none are
	ended        time.Time // when the last run ended; zero if there was none
}

// step is the next action for a job.
type step struct {
	memory
	fire    bool
	nominal time.Time // to fire, or to wait for; zero: none will come any more
	dropped bool      // nominal times were dropped
}

// plan returns whether a job that is not running fires now, and for which nominal time, or for
// which one it waits. A nominal time is fired only when its jitter has passed, too.
func (t *Timetable) plan(job string, overlap Overlap, m memory, now time.Time) step {
	m, skipped := t.skipOverlapped(overlap, m)
	policy := t.schedule.CatchUp
	if _, came := t.latest(m.handled, m.ended); came && overlap != OverlapSkip && policy == CatchUpNone {
		policy = CatchUpLast // it was not missed: it waited for the run to end
	}
	due := t.dueWithJitter(job, policy, m.handled, now)
	s := step{memory: m, dropped: due.Dropped || skipped}
	if len(due.Fire) == 0 {
		s.handled = due.Handled
		s.nominal, _ = t.Next(s.handled)
		return s
	}
	s.nominal = due.Fire[0]
	if t.FireAt(job, s.nominal).After(now) {
		return s
	}
	s.fire, s.handled = true, s.nominal
	if last := due.Fire[len(due.Fire)-1]; len(due.Fire) > 1 && !m.catchingUpTo.After(m.handled) {
		s.catchingUpTo = last
	}
	return s
}

// dueWithJitter is Due, with lateness counted from when the jitter has passed.
func (t *Timetable) dueWithJitter(job string, policy CatchUp, last, now time.Time) Due {
	if policy != CatchUpNone {
		return t.due(policy, last, now)
	}
	due := t.due(CatchUpLast, last, now)
	if len(due.Fire) > 0 && now.Sub(t.FireAt(job, due.Fire[0])) > t.schedule.Grace {
		return Due{Handled: due.Handled, Dropped: true}
	}
	return due
}

// skipOverlapped drops the nominal times that came while the last run went on. Those that were
// missed before it are not among them: they come first, and as long as there are some, nothing is
// dropped.
func (t *Timetable) skipOverlapped(overlap Overlap, m memory) (memory, bool) {
	if overlap != OverlapSkip || m.ended.IsZero() {
		return m, false
	}
	if next, ok := t.Next(m.handled); !ok || !next.After(m.catchingUpTo) {
		return m, false
	}
	latest, ok := t.latest(m.handled, m.ended)
	if ok {
		m.handled = latest
	}
	return m, ok
}
