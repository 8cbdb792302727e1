package cron

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func lines(firings []Firing) string {
	var b strings.Builder
	for _, f := range firings {
		fmt.Fprintln(&b, f)
	}
	return b.String()
}

func TestExplainTellsOfClockChanges(t *testing.T) {
	tests := []struct {
		name, want string
		s          Schedule
		now        time.Time
	}{
		{"gap", `
Sat 28 Mar 2026 02:30 CET (UTC+01:00), in 2 h 30 min
Sun 29 Mar 2026 03:00 CEST (UTC+02:00), in 26 h; clocks went forward by 1 h on Sun 29 Mar 2026 at 02:00; 02:30 does not exist on this day, so it fires right after the gap
Mon 30 Mar 2026 02:30 CEST (UTC+02:00), in 2 days 1 h
`, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"}, time.Date(2026, 3, 27, 23, 0, 0, 0, time.UTC)},
		{"fold", `
Sun 25 Oct 2026 02:30 CEST (UTC+02:00), in 30 min; 02:30 comes twice on this day, it fires at the first
Mon 26 Oct 2026 02:30 CET (UTC+01:00), in 25 h 30 min; clocks went back by 1 h on Sun 25 Oct 2026 at 03:00
Tue 27 Oct 2026 02:30 CET (UTC+01:00), in 2 days 1 h
`, Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"}, time.Date(2026, 10, 25, 0, 0, 0, 0, time.UTC)},
		{"fold, both", `
Sun 1 Nov 2026 01:00 EDT (UTC-04:00), in 10 s; the first 01:00 of this day
Sun 1 Nov 2026 01:00 EST (UTC-05:00), in 1 h; clocks went back by 1 h on Sun 1 Nov 2026 at 02:00; the second 01:00 of this day
Sun 1 Nov 2026 02:00 EST (UTC-05:00), in 2 h
`, Schedule{Spec: "@hourly", Zone: "America/New_York"}, time.Date(2026, 11, 1, 4, 59, 50, 0, time.UTC)},
		{"numbers for a name", `
Mon 1 Jun 2026 00:00 (UTC-03:00), in 3 h
Tue 2 Jun 2026 00:00 (UTC-03:00), in 27 h
Wed 3 Jun 2026 00:00 (UTC-03:00), in 2 days 3 h
`, Schedule{Spec: "@daily", Zone: "America/Sao_Paulo"}, time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)},
		{"an interval knows no wall clock", `
Sun 25 Oct 2026 02:00 CEST (UTC+02:00), in 30 min
Sun 25 Oct 2026 02:00 CET (UTC+01:00), in 1 h 30 min; clocks went back by 1 h on Sun 25 Oct 2026 at 03:00
Sun 25 Oct 2026 03:00 CET (UTC+01:00), in 2 h 30 min
`, Schedule{Spec: "@every 1h", Zone: "Europe/Berlin"}, time.Date(2026, 10, 24, 23, 30, 0, 0, time.UTC)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := lines(parse(t, test.s).Explain(test.now, 3))
			if got != test.want[1:] {
				t.Errorf("got\n%swant%s", got, test.want)
			}
		})
	}
}

func TestExplainStopsAtTheEnd(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	timetable := parse(t, Schedule{Spec: "@daily", End: now.AddDate(0, 0, 3)})
	if n := len(timetable.Explain(now, 10)); n != 2 {
		t.Errorf("%d firings, want 2", n)
	}
}

func ExampleTimetable_Explain() {
	timetable, err := Parse(Schedule{Spec: "0 9 31 * *", Zone: "Europe/Lisbon"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, firing := range timetable.Explain(time.Date(2026, 1, 30, 9, 0, 0, 0, time.UTC), 2) {
		fmt.Println(firing)
	}
	// Output:
	// Sat 31 Jan 2026 09:00 WET (UTC+00:00), in 24 h
	// Tue 31 Mar 2026 09:00 WEST (UTC+01:00), in 59 days 23 h; clocks went forward by 1 h on Sun 29 Mar 2026 at 01:00
}
