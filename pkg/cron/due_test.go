package cron

import (
	"testing"
	"time"
)

// caughtUp is what is due by the schedule's own catch-up policy.
func caughtUp(t *Timetable, last, now time.Time) dueTimes {
	return t.due(t.schedule.CatchUp, last, now)
}

// A thousand years of missed seconds are 32 billion nominal times, to pass through which takes hours. due computes a few dozen
// of them for each that fires.
func TestAThousandYearsOfBeingOffAreCheap(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "* * * * * *", Zone: "Europe/Berlin", CatchUp: CatchUpAll, CatchUpMax: 1000})
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	computed := make(chan dueTimes, 1)
	go func() { computed <- caughtUp(timetable, now.AddDate(-1000, 0, 0), now) }()
	select {
	case due := <-computed:
		if len(due.fire) != 1000 || !due.dropped || !due.handled.Equal(now) || !due.fire[999].Equal(now) {
			t.Errorf("fire %d, dropped %v, handled %v", len(due.fire), due.dropped, due.handled)
		}
	case <-time.After(time.Minute):
		t.Error("not computed within a minute")
	}
}

func TestYearOfBeingOffUnderEachPolicy(t *testing.T) {
	last, now := time.Date(2025, 6, 1, 6, 0, 0, 0, time.UTC), time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for policy, want := range map[CatchUp]int{CatchUpNone: 0, CatchUpLast: 1, CatchUpAll: 7} {
		due := caughtUp(parse(t, Schedule{Spec: "@daily", CatchUp: policy, CatchUpMax: 7}), last, now)
		if len(due.fire) != want || !due.dropped || !due.handled.Equal(now.Truncate(24*time.Hour)) {
			t.Errorf("%s: %+v, want %d fired", policy, due, want)
		}
	}
}

// The database clock jumps an hour ahead and back: each nominal time fires once.
func TestClockJumpsFireNothingTwice(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "*/10 * * * *", CatchUp: CatchUpAll})
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	last := noon.Add(-time.Minute)
	fired := map[time.Time]int{}
	for _, minutes := range []int{0, 1, 10, 70, 11, 20, 69, 71, 80} {
		due := caughtUp(timetable, last, noon.Add(time.Duration(minutes)*time.Minute))
		for _, nominal := range due.fire {
			fired[nominal]++
		}
		last = due.handled
	}
	for minutes := 0; minutes <= 80; minutes += 10 {
		if n := fired[noon.Add(time.Duration(minutes)*time.Minute)]; n != 1 {
			t.Errorf("minute %d fired %d times", minutes, n)
		}
	}
	if len(fired) != 9 {
		t.Errorf("%d nominal times fired, want 9", len(fired))
	}
}

func TestAShortOutageDropsNothingUnderNone(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "@hourly", CatchUp: CatchUpNone})
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	if due := caughtUp(timetable, noon.Add(-time.Minute), noon.Add(10*time.Second)); len(due.fire) != 1 || due.dropped {
		t.Errorf("10 s late: %+v", due)
	}
	if due := caughtUp(timetable, noon.Add(-time.Minute), noon.Add(2*time.Minute)); len(due.fire) != 0 || !due.dropped {
		t.Errorf("2 min late: %+v", due)
	}
}

func TestNothingIsDueAfterTheEnd(t *testing.T) {
	end := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	timetable := parse(t, Schedule{Spec: "@hourly", End: end})
	if due := caughtUp(timetable, end.Add(-90*time.Minute), end.AddDate(1, 0, 0)); len(due.fire) != 1 || !due.handled.Equal(end.Add(-time.Hour)) {
		t.Errorf("%+v, want the one at 11:00", due)
	}
	if due := caughtUp(timetable, end, end.AddDate(1, 0, 0)); len(due.fire) != 0 {
		t.Errorf("%+v, want none", due)
	}
}

// Most calls find nothing due; this is the cost of 100,000 jobs for a leader in each pass.
func BenchmarkDueWithNothingDue(b *testing.B) {
	timetable := parse(b, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for b.Loop() {
		caughtUp(timetable, now.Add(-time.Hour), now)
	}
}

func BenchmarkDueAfterAYear(b *testing.B) {
	timetable := parse(b, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for b.Loop() {
		caughtUp(timetable, now.AddDate(-1, 0, 0), now)
	}
}
