package scale

import (
	"slices"
	"time"
)

const (
	upPeriod   = 15 * time.Second
	upCount    = 4 // instances a period, or as many again as there were
	downPeriod = time.Minute
	downCount  = 10 // instances a period, and at most half
)

// rates limits how fast the number of instances changes. In any period it grows to at most twice, or four
// more than, the least number of the period, and falls to no less than half, or ten less than, the largest.
func (t *decider) rates() {
	t.d.Desired = t.d.Stabilised
	switch {
	case t.d.Desired > t.s.Desired:
		t.limitUp(t.upLimit(upCount, upPeriod), NoteRateUp)
		t.slowStart()
	case t.d.Desired < t.s.Desired:
		t.limitDown()
	}
}

// upLimit is count more than the least number of the period, or twice that number.
func (t *decider) upLimit(count int, period time.Duration) int {
	least, _ := t.extremes(period)
	return least + max(count, least)
}

func (t *decider) limitUp(limit int, code NoteCode) {
	if limit = max(limit, t.s.Desired); t.d.Desired > limit {
		t.note(code, float64(t.d.Desired), float64(limit), 0)
		t.d.Desired = limit
	}
}

// slowStart keeps a template that was never ready in the past day to a few instances, until one is ready.
func (t *decider) slowStart() {
	if t.o.Ready > 0 || !t.s.WasReady.IsZero() && t.now.Sub(t.s.WasReady) < 24*time.Hour {
		return
	}
	t.limitUp(t.p.SlowStart, NoteSlowStart)
}

func (t *decider) limitDown() {
	if limit := min(t.downLimit(), t.s.Desired); t.d.Desired < limit {
		t.note(NoteRateDown, float64(t.d.Desired), float64(limit), 0)
		t.d.Desired = limit
	}
}

// downLimit is the number to which the largest of the last minute may fall.
func (t *decider) downLimit() int {
	_, most := t.extremes(downPeriod)
	return most - min(downCount, (most+1)/2)
}

// extremes are the least and the largest desired number of the last period.
func (t *decider) extremes(period time.Duration) (least, most int) {
	n := t.s.Desired
	least, most = n, n
	for _, change := range slices.Backward(t.s.Changes) {
		if t.now.Sub(change.At) >= period {
			break
		}
		n -= change.By
		least, most = min(least, n), max(most, n)
	}
	return least, most
}

// recentChanges are those of the longest period.
func recentChanges(changes []Step, now time.Time) []Step {
	var recent []Step
	for _, change := range changes {
		if now.Sub(change.At) < downPeriod {
			recent = append(recent, change)
		}
	}
	return recent
}
