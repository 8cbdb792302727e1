package cron

import (
	"strings"
	"testing"
	"time"
)

func parse(t testing.TB, s Schedule) *Timetable {
	t.Helper()
	timetable, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return timetable
}

// at reads "2026-03-29 01:59" in the zone, or a full RFC 3339 time.
func at(t testing.TB, zone, text string) time.Time {
	t.Helper()
	location, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text, "T") {
		instant, err := time.Parse(time.RFC3339, text)
		if err != nil {
			t.Fatal(err)
		}
		return instant.In(location)
	}
	instant, err := time.ParseInLocation("2006-01-02 15:04", text, location)
	if err != nil {
		t.Fatal(err)
	}
	return instant
}

func TestNext(t *testing.T) {
	const berlin, newYork = "Europe/Berlin", "America/New_York"
	tests := []struct {
		name  string
		s     Schedule
		after string
		want  []string // RFC 3339 with offset
	}{
		{"every minute", Schedule{Spec: "* * * * *"}, "2026-01-01 00:00", []string{"2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"}},
		{"with seconds", Schedule{Spec: "*/20 * * * * *"}, "2026-01-01 00:00", []string{"2026-01-01T00:00:20Z", "2026-01-01T00:00:40Z", "2026-01-01T00:01:00Z"}},
		{"month ends", Schedule{Spec: "0 0 31 * *"}, "2026-01-01 00:00", []string{"2026-01-31T00:00:00Z", "2026-03-31T00:00:00Z", "2026-05-31T00:00:00Z"}},
		{"leap days", Schedule{Spec: "0 12 29 2 *"}, "2026-01-01 00:00", []string{"2028-02-29T12:00:00Z", "2032-02-29T12:00:00Z"}},
		{"no leap day in 2100", Schedule{Spec: "0 12 29 2 *"}, "2096-03-01 00:00", []string{"2104-02-29T12:00:00Z"}},
		{"day of month or day of week", Schedule{Spec: "0 0 13 * fri"}, "2026-02-01 00:00", []string{"2026-02-06T00:00:00Z", "2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z"}},
		{"weekly", Schedule{Spec: "@weekly"}, "2026-01-01 00:00", []string{"2026-01-04T00:00:00Z", "2026-01-11T00:00:00Z"}},

		{
			"daily over a gap",
			Schedule{Spec: "30 2 * * *", Zone: berlin},
			"2026-03-28 00:00",
			[]string{"2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"},
		},
		{
			"daily over a gap, skipping",
			Schedule{Spec: "30 2 * * *", Zone: berlin, Gap: GapSkip},
			"2026-03-28 00:00",
			[]string{"2026-03-28T02:30:00+01:00", "2026-03-30T02:30:00+02:00"},
		},
		{
			"many wall times in one gap fire once",
			Schedule{Spec: "*/10 2,3 * * *", Zone: berlin},
			"2026-03-28 03:45",
			[]string{"2026-03-28T03:50:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-29T03:10:00+02:00"},
		},
		{
			"hourly over a gap",
			Schedule{Spec: "30 * * * *", Zone: berlin},
			"2026-03-29 00:45",
			[]string{"2026-03-29T01:30:00+01:00", "2026-03-29T03:30:00+02:00"},
		},
		{
			"hourly over a gap, firing",
			Schedule{Spec: "30 * * * *", Zone: berlin, Gap: GapFire},
			"2026-03-29 00:45",
			[]string{"2026-03-29T01:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00"},
		},
		{
			"daily over a fold",
			Schedule{Spec: "30 2 * * *", Zone: berlin},
			"2026-10-24 12:00",
			[]string{"2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"},
		},
		{
			"daily over a fold, both",
			Schedule{Spec: "30 2 * * *", Zone: berlin, Fold: FoldBoth},
			"2026-10-24 12:00",
			[]string{"2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00", "2026-10-26T02:30:00+01:00"},
		},
		{
			"hourly over a fold",
			Schedule{Spec: "@hourly", Zone: newYork},
			"2026-11-01 00:30",
			[]string{"2026-11-01T01:00:00-04:00", "2026-11-01T01:00:00-05:00", "2026-11-01T02:00:00-05:00"},
		},
		{
			"hourly over a fold, first only",
			Schedule{Spec: "@hourly", Zone: newYork, Fold: FoldFirst},
			"2026-11-01 00:30",
			[]string{"2026-11-01T01:00:00-04:00", "2026-11-01T02:00:00-05:00"},
		},
		{
			"midnight that does not exist",
			Schedule{Spec: "@daily", Zone: "America/Sao_Paulo"},
			"2018-11-03 12:00",
			[]string{"2018-11-04T01:00:00-02:00", "2018-11-05T00:00:00-02:00"},
		},
		{
			"gap of half an hour",
			Schedule{Spec: "10 2 * * *", Zone: "Australia/Lord_Howe"},
			"2026-10-03 12:00",
			[]string{"2026-10-04T02:30:00+11:00", "2026-10-05T02:10:00+11:00"},
		},
		{
			"a day that does not exist",
			Schedule{Spec: "0 12 * * *", Zone: "Pacific/Apia"},
			"2011-12-29 06:00",
			[]string{"2011-12-29T12:00:00-10:00", "2011-12-31T00:00:00+14:00", "2011-12-31T12:00:00+14:00"},
		},

		{
			"start is included, end is not",
			Schedule{Spec: "0 * * * *", Start: time.Date(2026, 5, 1, 6, 0, 0, 0, time.UTC), End: time.Date(2026, 5, 1, 8, 0, 0, 0, time.UTC)},
			"2026-01-01 00:00",
			[]string{"2026-05-01T06:00:00Z", "2026-05-01T07:00:00Z", ""},
		},
		{"interval from 1970", Schedule{Spec: "@every 90m"}, "2026-01-01 00:00", []string{"2026-01-01T01:30:00Z", "2026-01-01T03:00:00Z"}},
		{"interval from start", Schedule{Spec: "@every 50m", Start: time.Date(2026, 1, 1, 0, 7, 0, 0, time.UTC)}, "2026-01-01 00:00", []string{"2026-01-01T00:07:00Z", "2026-01-01T00:57:00Z"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			timetable := parse(t, test.s)
			now := at(t, timetable.schedule.Zone, test.after)
			for _, want := range test.want {
				next, ok := timetable.Next(now)
				if got := next.Format(time.RFC3339); ok != (want != "") || ok && got != want {
					t.Fatalf("after %s: %s %v, want %q", now.Format(time.RFC3339), got, ok, want)
				}
				now = next
			}
		})
	}
}

func TestBadSchedulesNameTheFieldAndTheWayOut(t *testing.T) {
	tests := []struct {
		s     Schedule
		wants []string
	}{
		{Schedule{}, []string{"spec is empty", "30 2 * * *"}},
		{Schedule{Spec: "61 * * * *"}, []string{`minute field "61"`, "use 0-59"}},
		{Schedule{Spec: "0 24 * * *"}, []string{`hour field "24"`, "0-23"}},
		{Schedule{Spec: "0 0 0 * *"}, []string{`day of month field "0"`, "1-31"}},
		{Schedule{Spec: "0 0 * 13 *"}, []string{`month field "13"`, "jan-dec"}},
		{Schedule{Spec: "0 0 * * 7"}, []string{`day of week field "7"`, "0 is Sunday"}},
		{Schedule{Spec: "99 * * * * *"}, []string{`second field "99"`}},
		{Schedule{Spec: "61 25 * * *"}, []string{"minute field", "hour field"}},
		{Schedule{Spec: "0 0 L * *"}, []string{"day of month", "L"}},
		{Schedule{Spec: "0 0 1W * *"}, []string{"day of month"}},
		{Schedule{Spec: "0 0 * * 5#2"}, []string{"day of week", "not supported"}},
		{Schedule{Spec: "1,,2 * * * *"}, []string{"minute", "empty element"}},
		{Schedule{Spec: "*5 * * * *"}, []string{"minute", "star"}},
		{Schedule{Spec: "*/0 * * * *"}, []string{"minute", "positive"}},
		{Schedule{Spec: "* * *"}, []string{"3 fields", "day of week"}},
		{Schedule{Spec: "0 0 30 2 *"}, []string{"never comes", "day of month"}},
		{Schedule{Spec: "@reboot"}, []string{"@hourly"}},
		{Schedule{Spec: "@every soon"}, []string{"duration", "@every 90m"}},
		{Schedule{Spec: "@every 0.5s"}, []string{"whole seconds"}},
		{Schedule{Spec: "@every -5m"}, []string{"duration"}},
		{Schedule{Spec: "TZ=UTC 0 0 * * *"}, []string{"zone field"}},
		{Schedule{Spec: "TZ=x"}, []string{"zone field"}},
		{Schedule{Spec: "@daily", Zone: "Mars/Olympus"}, []string{`zone "Mars/Olympus"`, "Europe/Berlin"}},
		{Schedule{Spec: "@daily", Zone: "Local"}, []string{"IANA"}},
		{Schedule{Spec: "@daily", CatchUp: "some"}, []string{"catch up", "none", "last", "all"}},
		{Schedule{Spec: "@daily", CatchUpMax: 5000}, []string{"catch up max", "1000"}},
		{Schedule{Spec: "@daily", Gap: "x", Fold: "y"}, []string{"gap", "fold"}},
		{Schedule{Spec: "@daily", Jitter: -1}, []string{"jitter"}},
		{Schedule{Spec: "@daily", Start: time.Unix(9, 0), End: time.Unix(9, 0)}, []string{"end", "start"}},
	}
	for _, test := range tests {
		_, err := Parse(test.s)
		if err == nil {
			t.Errorf("%+v is accepted", test.s)
			continue
		}
		for _, want := range test.wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: error %q does not mention %q", test.s.Spec, err, want)
			}
		}
	}
}

func TestSearchIsBoundedInAllZones(t *testing.T) {
	// The last day of a leap year, in a year that only has a rule.
	berlin := parse(t, Schedule{Spec: "0 0 1 1 *", Zone: "Europe/Berlin"})
	if next, _ := berlin.Next(time.Date(2040, 12, 31, 12, 0, 0, 0, time.UTC)); next.Format(time.RFC3339) != "2041-01-01T00:00:00+01:00" {
		t.Errorf("new year after 2040 is %s", next)
	}
	rare := parse(t, Schedule{Spec: "59 59 23 29 2 *"})
	for _, zone := range []string{"Europe/Berlin", "Africa/Casablanca", "Asia/Gaza", "Antarctica/Troll", "America/St_Johns", "Asia/Kathmandu", "Pacific/Kiritimati"} {
		timetable := parse(t, Schedule{Spec: "59 59 23 29 2 *", Zone: zone})
		for _, year := range []int{1850, 1901, 2096, 9990} {
			from := time.Date(year, 3, 1, 0, 0, 0, 0, time.UTC)
			if _, ok := timetable.Next(from); !ok {
				t.Errorf("%s: nothing after %d", zone, year)
			}
		}
	}
	if next, _ := rare.Next(time.Date(1896, 3, 1, 0, 0, 0, 0, time.UTC)); next.Year() != 1904 {
		t.Errorf("leap day after 1896 is in %d, want 1904", next.Year())
	}
}

func BenchmarkNext(b *testing.B) {
	for _, spec := range []string{"*/5 * * * *", "30 2 * * *", "0 12 29 2 *"} {
		b.Run(spec, func(b *testing.B) {
			timetable := parse(b, Schedule{Spec: spec, Zone: "Europe/Berlin"})
			from := time.Date(2026, 3, 28, 12, 0, 0, 0, time.UTC)
			for b.Loop() {
				timetable.Next(from)
			}
		})
	}
}
