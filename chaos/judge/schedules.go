package judge

import (
	"slices"
	"time"
)

// cronLate is how long before the schedules are paused the last firing of each may have been whose entry has ended.
// A schedule that lags behind fires one nominal time after the end of the one before.
const cronLate = 30 * time.Second

// lastFired is when the newest of the firings was made.
func lastFired(firings []Firing) (last time.Time) {
	for _, f := range firings {
		if f.Fired.After(last) {
			last = f.Fired
		}
	}
	return last
}

// slotsOnce looks at each schedule by three records: the product's own of its firings, whose key makes it impossible
// that one is there twice; the entries that ended, each of which is one firing; and the rows that their runs inserted,
// one for each nominal time.
func slotsOnce(x *index, r *report) {
	byJob, byEntry := map[string][]Firing{}, map[int64]int{}
	for _, f := range x.Firings {
		byJob[f.Job] = append(byJob[f.Job], f)
		byEntry[f.Entry]++
	}
	for _, job := range x.Jobs {
		firings := byJob[job]
		slices.SortFunc(firings, func(a, b Firing) int { return a.Nominal.Compare(b.Nominal) })
		switch {
		case len(firings) == 0:
			r.bad("%s never fired", job)
		case !x.CronUntil.IsZero() && lastFired(firings).Before(x.CronUntil.Add(-cronLate)):
			r.bad("%s fired at %s for the last time, and was paused at %s", job,
				lastFired(firings).Format(time.TimeOnly), x.CronUntil.Format(time.TimeOnly))
		}
		for i, f := range firings {
			if !f.Running {
				r.checked++
				x.firedOnce(f, r)
			}
			if i > 0 && f.Nominal.Sub(firings[i-1].Nominal) != x.CronStep && !x.dropped(firings[i-1], f) {
				r.bad("%s fired at %s and then at %s", job, firings[i-1].Nominal.Format(time.RFC3339),
					f.Nominal.Format(time.RFC3339))
			}
		}
	}
	for i := range x.Endings {
		if e := &x.Endings[i]; e.Queue == x.Ticking && byEntry[e.Entry] != 1 {
			r.bad("entry %d of %s has ended, and is %d firings", e.Entry, e.Queue, byEntry[e.Entry])
		}
	}
	x.ticksAreFirings(r)
}

// firedOnce is that the entry of a firing has one outcome, and that its nominal time took effect once if it is done.
func (x *index) firedOnce(f Firing, r *report) {
	ends := x.endings[f.Entry]
	if len(ends) != 1 {
		r.bad("the entry of %s at %s has %d outcomes", f.Job, f.Nominal.Format(time.RFC3339), len(ends))
		return
	}
	want := 0
	if ends[0].Outcome == "done" {
		want = 1
	}
	if n := x.Ticks[Tick{f.Job, f.Nominal.UnixMicro()}]; n != want {
		r.bad("the entry of %s at %s is %s and took effect %d times", f.Job, f.Nominal.Format(time.RFC3339),
			ends[0].Outcome, n)
	}
}

// ticksAreFirings is that nothing took effect that was not fired.
func (x *index) ticksAreFirings(r *report) {
	fired := map[Tick]bool{}
	for _, f := range x.Firings {
		fired[Tick{f.Job, f.Nominal.UnixMicro()}] = true
	}
	for tick, n := range x.Ticks {
		if !fired[tick] || n > 1 {
			r.bad("%s at %s took effect %d times, fired: %v", tick.Job,
				time.UnixMicro(tick.Nominal).UTC().Format(time.RFC3339), n, fired[tick])
		}
	}
}

// dropped reports whether a job was so late with a nominal time that its schedule drops those between it and the one
// before.
func (x *index) dropped(before, f Firing) bool {
	return x.CatchUpMax > 0 && f.Nominal.Sub(before.Nominal) > x.CronStep &&
		f.Fired.Sub(f.Nominal) >= time.Duration(x.CatchUpMax-1)*x.CronStep
}
