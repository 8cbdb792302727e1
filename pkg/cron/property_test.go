package cron

import (
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// clockChanges are days in which clocks change, of all kinds: an hour, half an hour, at
// midnight, across the date line, and none at all.
var clockChanges = map[string][]string{
	"Europe/Berlin":       {"2026-03-29", "2026-10-25", "2040-12-31"},
	"America/New_York":    {"2026-03-08", "2026-11-01"},
	"Australia/Lord_Howe": {"2026-04-05", "2026-10-04"},
	"America/Sao_Paulo":   {"2018-02-18", "2018-11-04"},
	"Pacific/Apia":        {"2011-12-30"},
	"Africa/Casablanca":   {"2026-02-15", "2026-03-22"},
	"Asia/Kolkata":        {"2026-03-29"},
	"UTC":                 {"2024-02-29"},
}

func drawSpec(t *rapid.T) string {
	minute := rapid.SampledFrom([]string{"0", "30", "*/15", "7,59", "*", "10-20/5"}).Draw(t, "minute")
	hour := rapid.SampledFrom([]string{"*", "0", "2", "1,2,3", "*/2", "23", "0-4", "12"}).Draw(t, "hour")
	day := rapid.SampledFrom([]string{"*", "*", "*", "29", "30,31", "1"}).Draw(t, "day of month")
	weekday := rapid.SampledFrom([]string{"*", "*", "*", "sun", "fri-sat"}).Draw(t, "day of week")
	return strings.Join([]string{minute, hour, day, "*", weekday}, " ")
}

func drawSchedule(t *rapid.T) (Schedule, time.Time) {
	zones := make([]string, 0, len(clockChanges))
	for zone := range clockChanges {
		zones = append(zones, zone)
	}
	slices.Sort(zones)
	zone := rapid.SampledFrom(zones).Draw(t, "zone")
	day, err := time.Parse(time.DateOnly, rapid.SampledFrom(clockChanges[zone]).Draw(t, "day"))
	if err != nil {
		t.Fatal(err)
	}
	s := Schedule{
		Spec: drawSpec(t), Zone: zone,
		Gap:  rapid.SampledFrom([]Gap{"", GapFire, GapSkip}).Draw(t, "gap"),
		Fold: rapid.SampledFrom([]Fold{"", FoldFirst, FoldBoth}).Draw(t, "fold"),
	}
	return s, day.Add(-24 * time.Hour)
}

const wallFormat = "2006-01-02 15:04"

// byBruteForce checks every minute of three days: which wall times exist, how often, and
// which are jumped over. It shares nothing with Next but the matching of one wall time.
func byBruteForce(t *Timetable, from time.Time) []time.Time {
	matches := func(wall string) bool {
		parsed, err := time.Parse(wallFormat, wall)
		next, ok := t.spec.nextWall(parsed.Unix())
		return err == nil && ok && next == parsed.Unix()
	}
	seen := map[string]bool{}
	var fired []time.Time
	var latestWall string
	start := from.Add(-27 * time.Hour)
	for at := start; at.Before(from.Add(72 * time.Hour)); at = at.Add(time.Minute) {
		wall := at.In(t.zone).Format(wallFormat)
		fire := matches(wall) && (!seen[wall] || t.schedule.Fold == FoldBoth)
		if latestWall != "" && t.schedule.Gap == GapFire {
			for missing := nextMinute(latestWall); missing < wall; missing = nextMinute(missing) {
				fire = fire || matches(missing)
			}
		}
		seen[wall] = true
		latestWall = max(latestWall, wall)
		if fire && at.After(from) {
			fired = append(fired, at)
		}
	}
	return fired
}

func nextMinute(wall string) string {
	parsed, err := time.Parse(wallFormat, wall)
	if err != nil {
		return "~"
	}
	return parsed.Add(time.Minute).Format(wallFormat)
}

func TestUnracedNextAgreesWithEveryMinuteOfTheWallClock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, from := drawSchedule(t)
		timetable, err := Parse(s)
		if err != nil {
			t.Skip(err) // such as the 30th of February
		}
		from = from.Add(time.Duration(rapid.IntRange(0, 1440).Draw(t, "minutes")) * time.Minute)
		want := byBruteForce(timetable, from)
		cursor := from
		for _, w := range want {
			next, ok := timetable.Next(cursor)
			if !ok || !next.Equal(w) {
				t.Fatalf("%+v\nafter %v:\n got %v\nwant %v", s, cursor.In(timetable.zone), next, w.In(timetable.zone))
			}
			cursor = next
		}
		if next, ok := timetable.Next(cursor); ok && next.Before(from.Add(72*time.Hour)) {
			t.Fatalf("%+v\nextra firing at %v", s, next)
		}
	})
}

// For each moment within (previous nominal, nominal), the answer is the same instant.
func TestNominalTimesDoNotDependOnWhoAsks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, from := drawSchedule(t)
		timetable, err := Parse(s)
		if err != nil {
			t.Skip(err)
		}
		first, _ := timetable.Next(from)
		second, _ := timetable.Next(first)
		between := first.Add(time.Duration(rapid.Float64Range(0, 0.999).Draw(t, "fraction") * float64(second.Sub(first))))
		if again, _ := timetable.Next(between); !again.Equal(second) {
			t.Fatalf("%+v: next after %v is %v, want %v", s, between, again, second)
		}
	})
}

func TestDueAgreesWithCountingOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, from := drawSchedule(t)
		s.CatchUp = rapid.SampledFrom([]CatchUp{CatchUpNone, CatchUpLast, CatchUpAll}).Draw(t, "catch up")
		s.CatchUpMax = rapid.IntRange(1, 20).Draw(t, "max")
		timetable, err := Parse(s)
		if err != nil {
			t.Skip(err)
		}
		now := from.Add(time.Duration(rapid.Int64Range(-int64(time.Hour), int64(96*time.Hour)).Draw(t, "away")))
		var came []time.Time
		for next, ok := timetable.Next(from); ok && !next.After(now); next, ok = timetable.Next(next) {
			came = append(came, next)
		}
		want := came
		switch {
		case len(came) == 0:
		case s.CatchUp == CatchUpAll:
			want = came[max(0, len(came)-s.CatchUpMax):]
		case s.CatchUp == CatchUpNone && now.Sub(came[len(came)-1]) > time.Minute:
			want = nil
		default:
			want = came[len(came)-1:]
		}
		due := caughtUp(timetable, from, now)
		if !slices.EqualFunc(due.fire, want, time.Time.Equal) {
			t.Fatalf("%+v: fire %v, want %v", s, due.fire, want)
		}
		if due.dropped != (len(want) < len(came)) {
			t.Fatalf("%+v: dropped %v, fired %d of %d", s, due.dropped, len(want), len(came))
		}
		if again := caughtUp(timetable, due.handled, now); len(again.fire) != 0 || again.dropped {
			t.Fatalf("%+v: due again: %v", s, again)
		}
	})
}

func TestJitterIsStableBoundedAndKeepsTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, from := drawSchedule(t)
		s.Jitter = time.Duration(rapid.Int64Range(0, int64(2*time.Hour)).Draw(t, "jitter"))
		timetable, err := Parse(s)
		if err != nil {
			t.Skip(err)
		}
		job := rapid.String().Draw(t, "job")
		nominal, _ := timetable.Next(from)
		next, _ := timetable.Next(nominal)
		fire := timetable.FireAt(job, nominal)
		if fire.Before(nominal) || fire.Sub(nominal) >= max(s.Jitter, 1) || !fire.Before(next) {
			t.Fatalf("%v fires at %v with jitter %v and the next at %v", nominal, fire, s.Jitter, next)
		}
		if again := timetable.FireAt(job, nominal.UTC()); !again.Equal(fire) {
			t.Fatalf("%v fires at %v and at %v", nominal, fire, again)
		}
	})
}

// Jitter spreads the jobs of one second evenly: of 10,000, each tenth of the time gets about 1,000.
func TestJitterSpreadsJobs(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "@daily", Jitter: 100 * time.Second})
	nominal := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var tenths [10]int
	for job := range 10_000 {
		tenths[timetable.FireAt(time.Duration(job).String(), nominal).Sub(nominal)/(10*time.Second)]++
	}
	for i, n := range tenths {
		if n < 850 || n > 1150 {
			t.Errorf("tenth %d has %d jobs, want about 1000", i, n)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, spec := range []string{"* * * * *", "0 0 29 2 *", "*/5 1-4/2 ? jan-mar mon", "@daily", "@every 90m", "TZ=x", "CRON_TZ=UTC * * * * *", ", * * * *", "0 0 31 4,6 *", "59 59 23 31 12 *"} {
		f.Add(spec, "Europe/Berlin", int64(1774746000))
	}
	f.Add("30 2 * * *", "Australia/Lord_Howe", int64(2239999999))
	f.Fuzz(func(t *testing.T, spec, zone string, unix int64) {
		timetable, err := Parse(Schedule{Spec: spec, Zone: zone, Jitter: time.Second})
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Error("an error without words")
			}
			return
		}
		began := time.Now()
		defer func() {
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("%q in %q at %d took %v", spec, zone, unix, took)
			}
		}()
		now := time.Unix(unix%(1<<36), 0) // the year 4147 at most
		next, ok := timetable.Next(now)
		if !ok || !next.After(now) || next.Sub(now) > (searchYears+1)*366*24*time.Hour {
			t.Fatalf("%q in %q: next after %v is %v, %v", spec, zone, now, next, ok)
		}
		if second, _ := timetable.Next(next); !second.After(next) {
			t.Fatalf("%q in %q: %v follows %v", spec, zone, second, next)
		}
		due := caughtUp(timetable, now.AddDate(-1, 0, 0), now)
		if len(due.fire) > 1 || len(timetable.Explain(now, 3)) != 3 {
			t.Fatalf("%q in %q: due %v", spec, zone, due)
		}
	})
}
