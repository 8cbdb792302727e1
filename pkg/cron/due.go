package cron

import (
	"slices"
	"time"
)

// Due is the result of Timetable.Due: the nominal times to fire, and those that are dropped.
type Due struct {
	// Fire are the nominal times to fire, oldest first.
	Fire []time.Time
	// Handled is the latest nominal time that has come, fired or dropped: the last of the
	// next call. It is the old one if nothing has come.
	Handled time.Time
	// Dropped reports that the catch-up policy dropped nominal times before those in Fire.
	Dropped bool
}

// Due applies the catch-up policy to the nominal times after last and up to now. For a new
// job, last is when it was created. After a clock that jumped back last lies ahead of now,
// and nothing is due until now passes it: nothing fires twice.
//
// The cost grows with the number of nominal times to fire and with the logarithm of the time since
// last, not with the number of missed nominal times.
func (t *Timetable) Due(last, now time.Time) Due {
	return t.due(t.schedule.CatchUp, last, now)
}

func (t *Timetable) due(policy CatchUp, last, now time.Time) Due {
	latest, ok := t.latest(last, now)
	if !ok {
		return Due{Handled: last}
	}
	due := Due{Handled: latest}
	limit := 1
	switch policy {
	case CatchUpAll:
		limit = t.schedule.CatchUpMax
	case CatchUpNone:
		if now.Sub(latest) > t.schedule.Grace {
			due.Dropped = true
			return due
		}
	}
	for ; ok && len(due.Fire) < limit; latest, ok = t.latest(last, latest.Add(-1)) {
		due.Fire = append(due.Fire, latest)
	}
	due.Dropped = ok
	slices.Reverse(due.Fire)
	return due
}

// latest finds the last nominal time after last and up to now by bisection over whole
// seconds: whether another one comes from a second on and by now can only turn from yes to no.
func (t *Timetable) latest(last, now time.Time) (time.Time, bool) {
	found, ok := t.Next(last)
	if !ok || found.After(now) {
		return time.Time{}, false
	}
	for low, high := found.Unix(), now.Unix(); low < high; {
		middle := low + (high-low+1)/2
		next, ok := t.Next(time.Unix(middle-1, 0))
		if ok && !next.After(now) {
			found, low = next, next.Unix()
		} else {
			high = middle - 1
		}
	}
	return found, true
}
