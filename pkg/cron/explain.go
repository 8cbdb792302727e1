package cron

import (
	"fmt"
	"strings"
	"time"
)

// Firing is one nominal time in the result of Explain.
type Firing struct {
	Nominal time.Time     // in the schedule's zone
	Wait    time.Duration // from now
	Notes   []string      // effects of clock changes, in words
}

const maxExplained = 1000

// Explain returns the next n firings after now (at most 1000), fewer where the schedule ends.
func (t *Timetable) Explain(now time.Time, n int) []Firing {
	var firings []Firing
	previous := now
	for len(firings) < min(n, maxExplained) {
		nominal, ok := t.Next(previous)
		if !ok {
			break
		}
		firings = append(firings, Firing{nominal, nominal.Sub(now), t.notes(previous, nominal)})
		previous = nominal
	}
	return firings
}

// String is one line, such as "Sun 29 Mar 2026 03:00 CEST (UTC+02:00), in 3 days 4 h; 02:30 does not exist on
// this day, so it fires right after the gap".
func (f Firing) String() string {
	line := fmt.Sprintf("%s %s (UTC%s), in %s", f.Nominal.Format("Mon 2 Jan 2006"), wallClock(f.Nominal),
		f.Nominal.Format("-07:00"), inWords(f.Wait))
	return strings.Join(append([]string{line}, f.Notes...), "; ")
}

// wallClock adds the zone's letters where it has some; many zones only have numbers.
func wallClock(at time.Time) string {
	name, _ := at.Zone()
	if strings.ContainsAny(name, "+-") {
		return hourMinute(at)
	}
	return hourMinute(at) + " " + name
}

func hourMinute(at time.Time) string {
	if at.Second() != 0 {
		return at.Format("15:04:05")
	}
	return at.Format("15:04")
}

// inWords formats a duration in its two largest units.
func inWords(d time.Duration) string {
	const day = 24 * time.Hour
	d = d.Round(time.Second)
	switch {
	case d >= 2*day:
		return twoUnits(d, day, "days", time.Hour, "h")
	case d >= time.Hour:
		return twoUnits(d, time.Hour, "h", time.Minute, "min")
	case d >= time.Minute:
		return twoUnits(d, time.Minute, "min", time.Second, "s")
	}
	return fmt.Sprintf("%d s", d/time.Second)
}

func twoUnits(d, large time.Duration, name string, small time.Duration, smallName string) string {
	if rest := d % large / small; rest > 0 {
		return fmt.Sprintf("%d %s %d %s", d/large, name, rest, smallName)
	}
	return fmt.Sprintf("%d %s", d/large, name)
}

// notes describes the effects of clock changes on the firing at nominal, the one after previous.
func (t *Timetable) notes(previous, nominal time.Time) []string {
	var notes []string
	p := t.period(nominal.Unix())
	if p.start > previous.Unix() && p.offset != p.before {
		notes = append(notes, changeNote(p))
	}
	if t.spec.interval > 0 {
		return notes
	}
	if nominal.Unix() == p.start && t.schedule.Gap == GapFire && t.missedInGap(p) {
		missing, _ := t.spec.nextWall(p.start + p.before)
		notes = append(notes, wallText(missing)+" does not exist on this day, so it fires right after the gap")
	}
	wall := nominal.Unix() + p.offset
	if p.start != always && wall < p.start+p.before {
		notes = append(notes, "the second "+wallText(wall)+" of this day")
	}
	if p.end == forever {
		return notes
	}
	after := t.period(p.end)
	if wall < p.end+after.offset || after.offset >= p.offset {
		return notes
	}
	if t.schedule.Fold == FoldFirst {
		return append(notes, wallText(wall)+" comes twice on this day, it fires at the first")
	}
	return append(notes, "the first "+wallText(wall)+" of this day")
}

// changeNote describes the clock change at which the period began.
func changeNote(p period) string {
	direction, by := "forward", p.offset-p.before
	if by < 0 {
		direction, by = "back", -by
	}
	wall := time.Unix(p.start+p.before, 0).UTC()
	return fmt.Sprintf("clocks went %s by %s on %s at %s", direction,
		inWords(time.Duration(by)*time.Second), wall.Format("Mon 2 Jan 2006"), hourMinute(wall))
}

// wallText prints a wall time given as seconds of a clock that shows UTC.
func wallText(wall int64) string { return hourMinute(time.Unix(wall, 0).UTC()) }
