package cron

import (
	"fmt"
	"testing"
	"time"
)

// otherRules lets the job's entry wait for a time that is off by some, as rules of the zone of before would have.
func (b *bed) otherRules(job string, off time.Duration) {
	b.Helper()
	b.exec(`UPDATE penstock.entry SET due_at = due_at + $2 WHERE name = $1`, job, off)
	b.exec(`UPDATE penstock.cron_job SET due_at = due_at + $2, nominal_at = nominal_at + $2 WHERE name = $1`, job, off)
	b.engine = b.newEngine(open{b.pool}) // another term, whose program knows the rules of now
}

func TestATermFiresByTheRulesOfZonesThatItKnows(t *testing.T) {
	nine := time.Date(2026, 6, 2, 7, 0, 0, 0, time.UTC) // in Berlin
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		b := newBed(t)
		b.job(Job{Name: "close", Schedule: Schedule{Spec: "0 9 * * *", Zone: "Europe/Berlin", CatchUp: CatchUpNone}})
		b.at(noon)
		b.otherRules("close", off)
		b.at(noon.Add(time.Minute))
		b.at(nine.Add(-time.Hour))
		b.fired("close")
		b.at(nine)
		b.fired("close", nine)
		b.at(nine.Add(time.Hour))
		b.fired("close", nine)
	}
}

// The time has come by the rules of now, though the entry waits for a later one.
func TestATimeThatHasComeByTheRulesOfNowIsFired(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "close", Schedule: Schedule{Spec: "1 14 * * *", Zone: "Europe/Berlin", CatchUp: CatchUpNone}})
	b.at(noon)
	b.otherRules("close", time.Hour)
	b.at(noon.Add(90 * time.Second))
	b.at(b.now)
	b.fired("close", noon.Add(time.Minute))
}

// Whatever the policies, an entry waits where the judgement of another term has it wait: a new leader moves none.
func TestNothingIsMovedByTheSameRules(t *testing.T) {
	b := newBed(t)
	for i, spec := range []string{"@hourly", "*/7 * * * *", "@every 90m", "30 2 29 2 *"} {
		for _, policy := range []CatchUp{CatchUpNone, CatchUpLast, CatchUpAll} {
			for _, jitter := range []time.Duration{0, 20 * time.Minute, 3 * time.Hour} {
				b.job(Job{Name: fmt.Sprint(i, policy, jitter), Schedule: Schedule{
					Spec: spec, Zone: "America/New_York", Jitter: jitter, CatchUp: policy,
				}})
			}
		}
	}
	for _, away := range []time.Duration{0, 5 * time.Minute, 17 * time.Minute, 3 * time.Hour, 50 * time.Hour} {
		b.at(b.now.Add(away))
		b.at(b.now)
		fence := &counted{open: open{b.pool}}
		if err := b.newEngine(fence).judgeAgain(b.ctx, 0, 1<<40); err != nil || fence.n > 0 {
			t.Errorf("after %v at %s: entries were moved (%v)", away, b.now, err)
		}
		b.work()
	}
}
