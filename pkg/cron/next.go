package cron

import (
	"hash/fnv"
	"strconv"
	"time"
)

// searchYears bounds every search; see the package for why it is enough.
const searchYears = 12

// Next returns the first nominal time after the given one, in the schedule's zone; false
// if there is none.
func (t *Timetable) Next(after time.Time) (time.Time, bool) {
	if start := t.schedule.Start; !start.IsZero() && after.Before(start) {
		after = start.Add(-1)
	}
	next, ok := t.search(after)
	if end := t.schedule.End; !ok || !end.IsZero() && !next.Before(end) {
		return time.Time{}, false
	}
	return next, true
}

// search is Next without Start and End. Nominal times are whole seconds.
func (t *Timetable) search(after time.Time) (time.Time, bool) {
	first := after.Unix() + 1 // Unix rounds down, so this is the first whole second after
	if t.spec.interval > 0 {
		return t.onInterval(first), true
	}
	horizon := after.AddDate(searchYears, 0, 0).Unix()
	for first <= horizon {
		p := t.period(first)
		if at, ok := t.within(p, first); ok {
			return time.Unix(at, 0).In(t.zone), true
		}
		if p.end == forever {
			break
		}
		first = p.end
	}
	return time.Time{}, false
}

func (t *Timetable) onInterval(first int64) time.Time {
	step, anchor := int64(t.spec.interval/time.Second), int64(0)
	if !t.schedule.Start.IsZero() {
		anchor = t.schedule.Start.Add(time.Second - 1).Unix()
	}
	past := (first - anchor) % step
	if past < 0 {
		past += step
	}
	if past > 0 {
		first += step - past
	}
	return time.Unix(first, 0).In(t.zone)
}

// period is a stretch of time in which the clocks do not change; they may or may not change
// at its ends. Start and end are Unix
// seconds, offsets are seconds east of UTC, and before is the offset that ended at start.
type period struct {
	start, end     int64
	offset, before int64
}

const (
	always  = -1 << 62
	forever = 1 << 62
)

func (t *Timetable) period(at int64) period {
	local := time.Unix(at, 0).In(t.zone)
	_, offset := local.Zone()
	p := period{start: always, end: forever, offset: int64(offset), before: int64(offset)}
	start, end := local.ZoneBounds()
	if !start.IsZero() {
		p.start = start.Unix()
		_, before := start.Add(-time.Second).Zone()
		p.before = int64(before)
	}
	if !end.IsZero() {
		p.end = end.Unix()
	}
	// In the years after the zone's last explicit transition, bounds also fall on the ends of UTC
	// years, which changes nothing. On the last day of a leap year the returned end is before t (Go
	// 1.26).
	if p.end <= at {
		p.end = time.Date(time.Unix(at, 0).UTC().Year()+1, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	}
	return p
}

// within returns the first nominal time from first on that lies in the period.
func (t *Timetable) within(p period, first int64) (int64, bool) {
	if first <= p.start && t.missedInGap(p) && t.schedule.Gap == GapFire {
		return p.start, true
	}
	wall := first + p.offset
	if repeated := p.start + p.before; t.schedule.Fold == FoldFirst && p.start != always && wall < repeated {
		wall = repeated
	}
	wall, ok := t.spec.nextWall(wall)
	at := wall - p.offset
	return at, ok && at < p.end
}

// missedInGap reports whether the clock change that began the period skipped a matching wall time.
func (t *Timetable) missedInGap(p period) bool {
	if p.offset <= p.before {
		return false
	}
	wall, ok := t.spec.nextWall(p.start + p.before)
	return ok && wall < p.start+p.offset
}

// FireAt is when the entry for a nominal time is due: the nominal time plus the job's jitter.
func (t *Timetable) FireAt(job string, nominal time.Time) time.Time {
	limit := t.schedule.Jitter
	if next, ok := t.search(nominal); ok {
		limit = min(limit, next.Sub(nominal))
	}
	if limit <= 0 {
		return nominal
	}
	return nominal.Add(time.Duration(spread(job, nominal.Unix()) % uint64(limit)))
}

// spread hashes a firing. FNV alone maps neighbouring seconds to close values, so its
// result is mixed by the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
func spread(job string, nominal int64) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(job + "\x00" + strconv.FormatInt(nominal, 10))) // a hash never fails
	x := h.Sum64()
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
