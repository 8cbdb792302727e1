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
	handled time.Time // nominal times up to this one were fired or dropped
	// When the last run began: nominal times that had fallen due by then are left to the catch-up policy. When an
	// earlier one began, as long as times that fell due during that one are not handled. Zero: there was no run.
	catchingUpTo time.Time
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
	m, skipped := t.skipOverlapped(job, overlap, m, now)
	policy, until := t.schedule.CatchUp, now
	missed, during := t.overlapped(job, m)
	switch {
	case during.IsZero():
	case overlap == OverlapSkip:
		until = missed // the others are dropped when all that were missed are fired
	case policy == CatchUpNone:
		policy = CatchUpLast // it was not missed: it waited for the run to end
	}
	due := t.dueWithJitter(job, policy, m.handled, until, now)
	s := step{memory: m, dropped: due.dropped || skipped}
	if len(due.fire) == 0 {
		s.handled = due.handled
		s.nominal, _ = t.Next(s.handled)
		return s
	}
	s.nominal = due.fire[0]
	if t.FireAt(job, s.nominal).After(now) {
		s.dropped = skipped // the catch-up policy drops when it fires
		return s
	}
	s.fire, s.handled = true, s.nominal
	if during.IsZero() {
		s.catchingUpTo = now
	}
	return s
}

// beside is the step for a run that an operator requested. It precedes the schedule and fires none of its nominal
// times; it drops those only that fell due during the run before.
func (t *Timetable) beside(job string, overlap Overlap, m memory, requested, now time.Time) step {
	m, skipped := t.skipOverlapped(job, overlap, m, now)
	if _, during := t.overlapped(job, m); during.IsZero() {
		m.catchingUpTo = now
	}
	return step{memory: m, fire: true, nominal: requested, dropped: skipped}
}

// following is when a run is cancelled under OverlapCancel: the next nominal time falls due. Those that have fallen due
// when it begins wait for its end. False: no more times come.
func (t *Timetable) following(job string, handled, begins time.Time) (time.Time, bool) {
	if latest, ok := t.latest(handled, begins); ok && t.FireAt(job, latest).After(begins) {
		return t.FireAt(job, latest), true
	}
	next, ok := t.Next(later(handled, begins))
	return t.fireAt(job, next), ok
}

// dueWithJitter is due for the nominal times up to until, with lateness counted from when the jitter has passed.
func (t *Timetable) dueWithJitter(job string, policy CatchUp, last, until, now time.Time) dueTimes {
	if policy != CatchUpNone {
		return t.due(policy, last, until)
	}
	due := t.due(CatchUpLast, last, until)
	if len(due.fire) > 0 && now.Sub(t.FireAt(job, due.fire[0])) > t.schedule.Grace {
		return dueTimes{handled: due.handled, dropped: true}
	}
	return due
}

// skipOverlapped drops the nominal times that fell due while the last run went on. Those that were missed before it
// stay. Under CatchUpAll they are fired first, and the times that come until then are dropped with those of the run.
// Under the other policies one time fires: one that fell due after the run, or else the last that was missed.
func (t *Timetable) skipOverlapped(job string, overlap Overlap, m memory, now time.Time) (memory, bool) {
	missed, during := t.overlapped(job, m)
	if overlap != OverlapSkip || during.IsZero() {
		return m, false
	}
	if !missed.IsZero() && (t.schedule.CatchUp == CatchUpAll || t.lastDue(job, during, now).IsZero()) {
		return m, false
	}
	m.handled = during
	return m, true
}

// overlapped returns the last nominal time that had fallen due when the last run began, and the last that fell due
// while it went on, of those that are not handled. Zero: there is none.
func (t *Timetable) overlapped(job string, m memory) (missed, during time.Time) {
	missed = t.lastDue(job, m.handled, m.catchingUpTo)
	return missed, t.lastDue(job, later(m.handled, missed), m.ended)
}

// lastDue returns the last nominal time after another one whose jitter has passed by now, zero if there is none.
func (t *Timetable) lastDue(job string, after, now time.Time) time.Time {
	last, ok := t.latest(after, now)
	if ok && t.FireAt(job, last).After(now) {
		last, _ = t.latest(after, last.Add(-1))
	}
	return last
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
