package cron

import (
	"testing"
	"time"
)

// A thousand years of missed seconds are 32 billion nominal times, to pass through which takes hours. Due computes a few dozen
// of them for each that fires.
func TestAThousandYearsOfBeingOffAreCheap(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "* * * * * *", Zone: "Europe/Berlin", CatchUp: CatchUpAll, CatchUpMax: 1000})
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	computed := make(chan Due, 1)
	go func() { computed <- timetable.Due(now.AddDate(-1000, 0, 0), now) }()
	select {
	case due := <-computed:
		if len(due.Fire) != 1000 || !due.Dropped || !due.Handled.Equal(now) || !due.Fire[999].Equal(now) {
			t.Errorf("fire %d, dropped %v, handled %v", len(due.Fire), due.Dropped, due.Handled)
		}
	case <-time.After(time.Minute):
		t.Error("not computed within a minute")
	}
}

func TestYearOfBeingOffUnderEachPolicy(t *testing.T) {
	last, now := time.Date(2025, 6, 1, 6, 0, 0, 0, time.UTC), time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for policy, want := range map[CatchUp]int{CatchUpNone: 0, CatchUpLast: 1, CatchUpAll: 7} {
		due := parse(t, Schedule{Spec: "@daily", CatchUp: policy, CatchUpMax: 7}).Due(last, now)
		if len(due.Fire) != want || !due.Dropped || !due.Handled.Equal(now.Truncate(24*time.Hour)) {
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
		due := timetable.Due(last, noon.Add(time.Duration(minutes)*time.Minute))
		for _, nominal := range due.Fire {
			fired[nominal]++
		}
		last = due.Handled
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
	if due := timetable.Due(noon.Add(-time.Minute), noon.Add(10*time.Second)); len(due.Fire) != 1 || due.Dropped {
		t.Errorf("10 s late: %+v", due)
	}
	if due := timetable.Due(noon.Add(-time.Minute), noon.Add(2*time.Minute)); len(due.Fire) != 0 || !due.Dropped {
		t.Errorf("2 min late: %+v", due)
	}
}

func TestNothingIsDueAfterTheEnd(t *testing.T) {
	end := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	timetable := parse(t, Schedule{Spec: "@hourly", End: end})
	if due := timetable.Due(end.Add(-90*time.Minute), end.AddDate(1, 0, 0)); len(due.Fire) != 1 || !due.Handled.Equal(end.Add(-time.Hour)) {
		t.Errorf("%+v, want the one at 11:00", due)
	}
	if due := timetable.Due(end, end.AddDate(1, 0, 0)); len(due.Fire) != 0 {
		t.Errorf("%+v, want none", due)
	}
}

// Most calls find nothing due; this is the cost of 100,000 jobs for a leader in each pass.
func BenchmarkDueWithNothingDue(b *testing.B) {
	timetable := parse(b, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for b.Loop() {
		timetable.Due(now.Add(-time.Hour), now)
	}
}

func BenchmarkDueAfterAYear(b *testing.B) {
	timetable := parse(b, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for b.Loop() {
		timetable.Due(now.AddDate(-1, 0, 0), now)
	}
}
