package scale

import (
	"maps"
	"math"
	"slices"
	"time"
)

// The clock of the database may have been ahead and set right, and a number that was stored or reported may be any. A
// time in the future counts as now, and a number that is none, or absurd, as the nearest one that is sane: else it
// would hold up the decisions about its model until that time comes, or for good.

// Bounds of what decisions calculate with: the columns of decisions hold numbers up to countMax.
const (
	countMax   = 1e9
	serviceMax = 1e6 // seconds
)

// within is x within bounds; 0 for NaN.
func within(x, least, most float64) float64 {
	if math.IsNaN(x) {
		return 0
	}
	return min(max(x, least), most)
}

// ceil is the least whole number that is not below x, from 0 to countMax.
func ceil(x float64) int { return int(math.Ceil(within(x, 0, countMax))) }

func count(n int) int { return min(max(n, 0), countMax) }

// notAfter is a time, or now where that is earlier.
func notAfter(at, now time.Time) time.Time {
	if at.After(now) {
		return now
	}
	return at
}

func notAfterEach(times []time.Time, now time.Time) []time.Time {
	if !slices.ContainsFunc(times, now.Before) {
		return times
	}
	times = slices.Clone(times)
	for i := range times {
		times[i] = notAfter(times[i], now)
	}
	return times
}

// sane is the observation with times up to now and finite numbers.
func (o Obs) sane(now time.Time) Obs {
	for _, n := range []*int{
		&o.Waiting, &o.Late, &o.Running, &o.Due, &o.Urgent, &o.Ready, &o.Draining, &o.Unhealthy, &o.Floor,
	} {
		*n = count(*n)
	}
	for _, x := range []*float64{&o.Arrived, &o.Online, &o.Refused, &o.Busy, &o.PerMin, &o.Forecast} {
		*x = within(*x, 0, countMax)
	}
	for _, x := range []*float64{&o.Service, &o.ColdStart, &o.ColdStartP95} {
		*x = within(*x, 0, serviceMax)
	}
	o.LastRequest = notAfter(o.LastRequest, now)
	o.Starting = notAfterEach(o.Starting, now)
	for i, d := range o.Deployments {
		if slices.ContainsFunc(d.Starting, now.Before) {
			o.Deployments = slices.Clone(o.Deployments)
			o.Deployments[i].Starting = notAfterEach(d.Starting, now)
		}
	}
	return o
}

// sane is the state with times up to now and finite numbers. It shares no memory that it changes with s.
func (s State) sane(now time.Time, blockedFor time.Duration) State {
	for _, at := range []*time.Time{
		&s.At, &s.Counted, &s.SeenAt, &s.Since, &s.LastUse, &s.Synced, &s.WasReady, &s.Unused, &s.Begun.At,
	} {
		*at = notAfter(*at, now)
	}
	for _, x := range []*float64{&s.Rate, &s.Recent, &s.Seen} {
		*x = within(*x, 0, countMax)
	}
	s.Desired, s.Base, s.Begun.N = count(s.Desired), count(s.Base), count(s.Begun.N)
	for _, row := range []*[]float64{&s.Shadow, &s.Online, &s.Bare, &s.Late} {
		*row = saneRow(*row)
	}
	for _, window := range []*[]Level{&s.Held, &s.Wanted, &s.Unhealthy, &s.Window} {
		*window = saneWindow(*window, now)
	}
	if slices.ContainsFunc(s.Changes, func(c Step) bool { return c.At.After(now) }) {
		s.Changes = slices.Clone(s.Changes)
		for i := range s.Changes {
			s.Changes[i].At = notAfter(s.Changes[i].At, now)
		}
	}
	s.Stuck = maps.Clone(s.Stuck)
	for name, h := range s.Stuck {
		h.ReplacedAt = notAfter(h.ReplacedAt, now)
		h.BlockedUntil = notAfter(h.BlockedUntil, now.Add(blockedFor))
		s.Stuck[name] = h
	}
	return s
}

// rowMax bounds the slot-seconds of a shadow queue.
const rowMax = countMax * serviceMax

func saneRow(row []float64) []float64 {
	absurd := func(x float64) bool { return x != within(x, 0, rowMax) } // NaN among them
	if !slices.ContainsFunc(row, absurd) {
		return row
	}
	row = slices.Clone(row)
	for i := range row {
		row[i] = within(row[i], 0, rowMax)
	}
	return row
}

func saneWindow(window []Level, now time.Time) []Level {
	absurd := func(l Level) bool { return l.At.After(now) || l.N < -countMax || l.N > countMax }
	if !slices.ContainsFunc(window, absurd) {
		return window
	}
	window = slices.Clone(window)
	for i, l := range window {
		window[i] = Level{At: notAfter(l.At, now), N: min(max(l.N, -countMax), countMax)}
	}
	return window
}

// sane is the row with times up to now, but for CreatedAt, see outlived. A pause that lasts longer than any counts as
// over, and starts are stuck that began before stuck_min_seconds ago at most.
func (s *deploymentRow) sane(now time.Time) {
	if s.At.IsZero() {
		return
	}
	for _, at := range []**time.Time{&s.DecidedAt, &s.OrderedAt, &s.AppliedAt, &s.SeenAt, &s.FailedAt, &s.NoRoomAt} {
		if *at != nil && (*at).After(now) {
			*at, s.ahead = &now, true
		}
	}
	if s.RetryAt != nil && s.RetryAt.After(now.Add(backoffMax)) {
		s.RetryAt = nil
	}
	if before := now.Add(-time.Duration(s.policy.WithDefaults().StuckMin)); s.ReplaceBefore != nil {
		earliest := notAfter(*s.ReplaceBefore, before)
		s.ReplaceBefore = &earliest
	}
	s.Starting, s.NotReady = notAfterEach(s.Starting, now), notAfterEach(s.NotReady, now)
	for _, since := range []*map[string]time.Time{&s.RemovingSince, &s.Unhealthy} {
		*since = maps.Clone(*since)
		for name, at := range *since {
			if at.After(now) {
				(*since)[name], s.ahead = now, true
			}
		}
	}
}
