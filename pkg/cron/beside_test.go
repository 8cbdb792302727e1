package cron

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Runs beside the schedule, which an operator requests or retries, and what becomes of the nominal times around them.

var operator = invalidation.By{Actor: "ada", Reason: "test"}

// clock is a time of the first of June, given as "15:31".
func clock(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.DateTime, "2026-06-01 "+text+":00")
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// jittered makes an hourly job, and returns when its times of 13:00 and 14:00 fall due: 14 and 9 minutes after them.
func (b *bed) jittered(overlap Overlap) (first, second time.Time) {
	b.Helper()
	s := Schedule{Spec: "@hourly", Jitter: 30 * time.Minute}
	b.job(Job{Name: "job", Schedule: s, Overlap: overlap})
	t := parse(b.T, s)
	first, second = t.FireAt("job", clock(b.T, "13:00")), t.FireAt("job", clock(b.T, "14:00"))
	if first.Before(clock(b.T, "13:10")) || second.Before(clock(b.T, "14:06")) {
		b.Fatalf("the times fall due at %s and %s, too soon for the test", first, second)
	}
	b.at(noon)
	return first, second
}

// runNow requests a run, and returns it once it has begun.
func (b *bed) runNow() []*invalidation.Lock {
	b.Helper()
	if err := RunNow(b.ctx, b.pool, "job", operator); err != nil {
		b.Fatal(err)
	}
	b.at(b.now)
	return b.begun()
}

// begun is the run that has begun.
func (b *bed) begun() []*invalidation.Lock {
	b.Helper()
	run := b.claim()
	if len(run) != 1 {
		b.Fatalf("%d runs began at %s", len(run), b.now.Format(time.TimeOnly))
	}
	return run
}

// end ends a run at a time, and lets the engine see it.
func (b *bed) end(run []*invalidation.Lock, at time.Time) {
	b.Helper()
	b.now = at
	b.finish(run)
	b.at(at)
}

// cancels wants so many requests to cancel runs when the engine has made a pass at that time.
func (b *bed) cancels(at time.Time, want int) {
	b.Helper()
	b.at(at)
	if n := b.count(requestedSQL); n != want {
		b.Errorf("%d requests to cancel a run at %s, want %d", n, at.Format(time.TimeOnly), want)
	}
}

func TestARunNowKeepsTheTimeThatWaitsForItsJitter(t *testing.T) {
	b := newBed(t)
	first, _ := b.jittered(OverlapSkip)
	b.at(clock(t, "13:05"))
	b.end(b.runNow(), clock(t, "13:06"))
	b.at(first)
	b.fired("job", clock(t, "13:00"))
}

// A time that falls due during a run that was requested is treated as during any other.
func TestARunNowOverlapsWithTheTimeThatFallsDue(t *testing.T) {
	for overlap, want := range map[Overlap][]time.Time{
		OverlapSkip:  {clock(t, "14:00")},
		OverlapQueue: {clock(t, "13:00"), clock(t, "14:00")},
	} {
		t.Run(string(overlap), func(t *testing.T) {
			b := newBed(t)
			_, second := b.jittered(overlap)
			b.at(clock(t, "13:05"))
			b.end(b.runNow(), clock(t, "13:30"))
			b.work()
			b.at(second)
			b.fired("job", want...)
		})
	}
}

// A run that ends between a nominal time and the end of its jitter does not overlap with it.
func TestSkipKeepsATimeThatFallsDueAfterTheRun(t *testing.T) {
	b := newBed(t)
	first, second := b.jittered(OverlapSkip)
	b.at(first)
	b.end(b.begun(), clock(t, "14:05"))
	b.at(second)
	b.fired("job", clock(t, "13:00"), clock(t, "14:00"))
}

// pausedAfterFailure makes an hourly job that catches up on all, whose run of 13:00 has failed, and pauses it until after 16:00.
func (b *bed) pausedAfterFailure(overlap Overlap) invalidation.EntryID {
	b.Helper()
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpAll}, Overlap: overlap})
	b.at(noon)
	b.at(clock(b.T, "13:00"))
	failed := b.failRun(b.begun()[0])
	if err := Pause(b.ctx, b.pool, "job", operator, time.Time{}); err != nil {
		b.Fatal(err)
	}
	b.at(clock(b.T, "16:30"))
	return failed
}

func (b *bed) resume(at time.Time) {
	b.Helper()
	if err := Resume(b.ctx, b.pool, "job", operator); err != nil {
		b.Fatal(err)
	}
	b.at(at)
}

// What passed in a pause is for the catch-up policy, whatever ran in it.
func TestARunInAPauseDropsNoTimeOfThePause(t *testing.T) {
	for name, run := range map[string]func(*bed, invalidation.EntryID) []*invalidation.Lock{
		"run now": func(b *bed, _ invalidation.EntryID) []*invalidation.Lock { return b.runNow() },
		"retry": func(b *bed, failed invalidation.EntryID) []*invalidation.Lock {
			b.retry(failed)
			return b.begun()
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			failed := b.pausedAfterFailure(OverlapSkip)
			b.end(run(b, failed), clock(t, "16:35"))
			for b.resume(clock(t, "16:40")); b.work() > 0; {
			}
			b.fired("job", clock(t, "13:00"), clock(t, "14:00"), clock(t, "15:00"), clock(t, "16:00"))
		})
	}
}

func TestARunIsNotCancelledForTimesThatWereMissedBefore(t *testing.T) {
	t.Run("catch up", func(t *testing.T) {
		b := newBed(t)
		b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpAll}, Overlap: OverlapCancel})
		b.at(noon)
		b.at(clock(t, "16:05"))
		b.fired("job", clock(t, "13:00"))
		b.cancels(clock(t, "16:06"), 0)
		b.end(b.begun(), clock(t, "16:07"))
		b.fired("job", clock(t, "13:00"), clock(t, "14:00"))
		b.begun()
		b.cancels(clock(t, "16:59"), 0)
		b.cancels(clock(t, "17:00"), 1)
	})
	t.Run("retry", func(t *testing.T) {
		b := newBed(t)
		b.retry(b.pausedAfterFailure(OverlapCancel))
		b.begun()
		b.resume(clock(t, "16:40"))
		b.cancels(clock(t, "16:59"), 0)
		b.cancels(clock(t, "17:00"), 1)
	})
}

func TestARunIsCancelledWhenTheJitterOfTheNextHasPassed(t *testing.T) {
	t.Run("of the schedule", func(t *testing.T) {
		b := newBed(t)
		first, second := b.jittered(OverlapCancel)
		b.at(first)
		b.begun()
		b.cancels(clock(t, "14:05"), 0)
		b.cancels(second, 1)
	})
	t.Run("requested", func(t *testing.T) {
		b := newBed(t)
		first, _ := b.jittered(OverlapCancel)
		b.at(clock(t, "13:05"))
		b.runNow()
		b.cancels(clock(t, "13:06"), 0)
		b.cancels(first, 1)
	})
	t.Run("retried", func(t *testing.T) {
		b := newBed(t)
		first, second := b.jittered(OverlapCancel)
		b.at(first)
		failed := b.failRun(b.begun()[0])
		b.at(clock(t, "14:01"))
		b.retry(failed)
		b.begun()
		b.cancels(clock(t, "14:05"), 0)
		b.cancels(second, 1)
	})
}

// Times that the overlap policy drops are counted once, also where the push of the next entry is refused for a while.
func TestASkippedTimeIsCounted(t *testing.T) {
	b := newBed(t)
	payload := json.RawMessage(`{"x": "` + strings.Repeat("y", 200) + `"}`)
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly"}, Payload: payload})
	b.at(noon)
	b.at(clock(t, "13:00"))
	run := b.begun()
	b.exec(`SELECT penstock.alter_queue('reports', '{"payload_limit": 100}')`)
	b.end(run, clock(t, "15:30"))
	const refused = `SELECT count(*) FROM penstock.cron_job WHERE problem IS NOT NULL`
	if b.count(refused) != 1 {
		t.Fatal("the push was not refused")
	}
	b.exec(`SELECT penstock.alter_queue('reports', '{"payload_limit": 1000}')`)
	b.exec(`UPDATE penstock.cron_job SET check_at = '-infinity'`) // as a minute later
	b.at(clock(t, "15:31"))
	b.at(clock(t, "16:00"))
	b.fired("job", clock(t, "13:00"), clock(t, "16:00"))
	if n := b.engine.Status().Dropped; n != 1 {
		t.Errorf("policies dropped nominal times %d times, want once", n)
	}
}
