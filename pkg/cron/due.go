package cron

import (
	"slices"
	"time"
)

// dueTimes are the nominal times to fire, and whether others are dropped.
type dueTimes struct {
	// fire are the nominal times to fire, oldest first.
	fire []time.Time
	// handled is the latest nominal time that has come, fired or dropped: the last of the
	// next call. It is the old one if nothing has come.
	handled time.Time
	// dropped reports that the catch-up policy dropped nominal times before those in fire.
	dropped bool
}

// due applies a catch-up policy to the nominal times after last and up to now. For a new
// job, last is when it was created. After a clock that jumped back last lies ahead of now,
// and nothing is due until now passes it: nothing fires twice.
//
// The cost grows with the number of nominal times to fire and with the logarithm of the time since
// last, not with the number of missed nominal times.
func (t *Timetable) due(policy CatchUp, last, now time.Time) dueTimes {
	latest, ok := t.latest(last, now)
	if !ok {
		return dueTimes{handled: last}
	}
	due := dueTimes{handled: latest}
	limit := 1
	switch policy {
	case CatchUpAll:
		limit = t.schedule.CatchUpMax
	case CatchUpNone:
		if now.Sub(latest) > t.schedule.Grace {
			due.dropped = true
			return due
		}
	}
	for ; ok && len(due.fire) < limit; latest, ok = t.latest(last, latest.Add(-1)) {
		due.fire = append(due.fire, latest)
	}
	due.dropped = ok
	slices.Reverse(due.fire)
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
