package cron

import (
	"testing"
	"time"
)

const startWithin, finishWithin = 30 * time.Minute, 2 * time.Hour

// newDeadlineBed has a queue with deadlines, and a clock that is a day ahead of the database's: nothing is overdue.
func newDeadlineBed(t *testing.T) *bed {
	t.Helper()
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('reports', '{"start_within": "30 minutes", "finish_within": "2 hours"}')`)
	b.now = time.Now().Add(24 * time.Hour).UTC().Truncate(time.Hour)
	return b
}

// bound wants the run of a job to have the deadlines of a firing at that time.
func (b *bed) bound(job string, fired time.Time) {
	b.Helper()
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE name = $1 AND status = 'pending' AND start_by = $2 AND finish_by = $3`,
		job, fired.Add(startWithin), fired.Add(finishWithin)); n != 1 {
		b.Errorf("%s has no run with the deadlines of a firing at %v", job, fired)
	}
}

// unbound wants all waiting entries to be without deadlines.
func (b *bed) unbound(when string) {
	b.Helper()
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE status = 'initial' AND start_by IS NULL AND finish_by IS NULL`); n != 1 {
		b.Errorf("%d waiting entries without deadlines %s, want 1", n, when)
	}
}

func TestEntryThatIsMovedToAnotherTimeHasTheDeadlinesOfThatTime(t *testing.T) {
	b := newDeadlineBed(t)
	start := b.now
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpNone}})
	b.at(start)
	b.unbound("before the first time")
	b.at(start.Add(65 * time.Minute)) // no leader at the full hour
	b.fired("hourly")
	b.unbound("after the move")
	b.at(start.Add(2 * time.Hour))
	b.fired("hourly", start.Add(2*time.Hour))
	b.bound("hourly", start.Add(2*time.Hour))
}

// Builds of main gave waiting entries deadlines.
func TestMoveTakesDeadlinesAway(t *testing.T) {
	b := newDeadlineBed(t)
	start := b.now
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpNone}})
	b.at(start)
	b.exec(`UPDATE penstock.entry SET start_by = $1, finish_by = $1`, start.Add(90*time.Minute))
	b.at(start.Add(65 * time.Minute))
	b.unbound("after the move")
}

func TestFiringAfterAnOutageHasTheDeadlinesOfThatMoment(t *testing.T) {
	for name, away := range map[string]time.Duration{"the time that was missed": 100 * time.Minute, "a later time": 190 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			b := newDeadlineBed(t)
			start := b.now
			b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpLast}})
			b.at(start)
			b.at(start.Add(away))
			b.fired("hourly", start.Add(away).Truncate(time.Hour))
			b.bound("hourly", start.Add(away))
		})
	}
}

// The leader may look for overdue entries before it fires jobs: one that waits for its job's time is none.
func TestWaitingEntryDoesNotExpire(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('reports', '{"start_within": "1 millisecond"}')`)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.exec(`SELECT pg_sleep(0.01)`)
	if n, err := b.q.Expire(b.ctx, 10); n != 0 || err != nil {
		t.Errorf("%d entries expired (%v)", n, err)
	}
	b.at(noon.Add(time.Hour))
	b.fired("hourly", noon.Add(time.Hour))
	if n, err := b.q.Expire(b.ctx, 10); n != 1 || err != nil {
		t.Errorf("%d entries expired (%v) after the deadline of the run", n, err)
	}
}
