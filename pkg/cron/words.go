package cron

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	robfig "github.com/robfig/cron/v3"
)

// Words describes the schedule without its zone: "at 02:30 on weekdays", "every 5 minutes from 09:00 to 17:59".
func (t *Timetable) Words() string {
	if t.spec.interval > 0 {
		return "every " + inWords(t.spec.interval)
	}
	w := t.spec.walls
	words := wordsOfTime(w) + wordsOfDay(w)
	if months := bits(w.Month, 1, 12); len(months) < 12 {
		names := make([]string, len(months))
		for i, m := range months {
			names[i] = time.Month(m).String()
		}
		words += " in " + joined(names)
	}
	return words
}

// timesMax is how many times of a day are listed one by one.
const timesMax = 6

func wordsOfTime(w *robfig.SpecSchedule) string {
	seconds, minutes, hours := bits(w.Second, 0, 59), bits(w.Minute, 0, 59), bits(w.Hour, 0, 23)
	suffix := ""
	if len(seconds) > 1 || seconds[0] != 0 {
		suffix = " at second " + numbers(seconds)
		if step, regular := stepOf(seconds, 60); regular {
			suffix = ", every " + inUnits(step, "second") + " of it"
		}
	}
	if len(minutes)*len(hours) <= timesMax {
		var times []string
		for _, hour := range hours {
			for _, minute := range minutes {
				times = append(times, fmt.Sprintf("%02d:%02d", hour, minute))
			}
		}
		return "at " + joined(times) + suffix
	}
	words := "at minute " + numbers(minutes) + " of every hour"
	if step, regular := stepOf(minutes, 60); regular {
		words = "every " + inUnits(step, "minute")
	}
	if len(minutes) == 1 && minutes[0] == 0 {
		words = "every hour"
	}
	if step, regular := stepOf(hours, 24); regular && step > 1 && len(minutes) == 1 {
		words = fmt.Sprintf("every %d hours at minute %d", step, minutes[0])
	} else if len(hours) < 24 {
		words += wordsOfHours(hours)
	}
	return words + suffix
}

func wordsOfHours(hours []int) string {
	last := hours[len(hours)-1]
	if last-hours[0] == len(hours)-1 {
		return fmt.Sprintf(" from %02d:00 to %02d:59", hours[0], last)
	}
	return " in the hours " + numbers(hours)
}

func wordsOfDay(w *robfig.SpecSchedule) string {
	days, weekdays := bits(w.Dom, 1, 31), bits(w.Dow, 0, 6)
	everyDay, everyWeekday := len(days) == 31, len(weekdays) == 7
	switch {
	case everyDay && everyWeekday:
		return ""
	case everyDay:
		return " on " + wordsOfWeekdays(weekdays)
	case everyWeekday:
		return " on day " + numbers(days) + " of the month"
	}
	return " on day " + numbers(days) + " of the month or on " + wordsOfWeekdays(weekdays)
}

func wordsOfWeekdays(weekdays []int) string {
	switch numbers(weekdays) {
	case "1, 2, 3, 4 and 5":
		return "weekdays"
	case "0 and 6":
		return "weekends"
	}
	names := make([]string, len(weekdays))
	for i, day := range weekdays {
		names[i] = time.Weekday(day).String() + "s"
	}
	return joined(names)
}

// bits lists the values of a field, from a bit mask of the parser.
func bits(mask uint64, first, last int) []int {
	var values []int
	for v := first; v <= last; v++ {
		if mask&(1<<uint(v)) != 0 {
			values = append(values, v)
		}
	}
	return values
}

// stepOf returns the step of values that begin at 0 and fill a cycle evenly.
func stepOf(values []int, cycle int) (step int, regular bool) {
	if values[0] != 0 || cycle%len(values) != 0 {
		return 0, false
	}
	step = cycle / len(values)
	for i, v := range values {
		if v != i*step {
			return 0, false
		}
	}
	return step, len(values) > 1
}

func inUnits(n int, unit string) string {
	if n == 1 {
		return unit
	}
	return strconv.Itoa(n) + " " + unit + "s"
}

func numbers(values []int) string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = strconv.Itoa(v)
	}
	return joined(texts)
}

func joined(texts []string) string {
	if len(texts) == 1 {
		return texts[0]
	}
	return strings.Join(texts[:len(texts)-1], ", ") + " and " + texts[len(texts)-1]
}
