package scale

import (
	"math"
	"time"
)

// heldShare is the utilisation up to which one instance fewer would do.
const heldShare = 0.85

// hold keeps a level until the base has been below it for the hold time, and while one instance fewer
// would be almost full. Level 1 is kept by the hazard of another request.
func (t *decider) hold() {
	t.s.Held = pushLevel(t.s.Held, Level{At: t.now, N: t.d.Base}, t.now.Add(-time.Duration(t.p.Hold)))
	t.d.Stabilised = t.d.Raw
	held := t.s.Held[0]
	held.N = min(held.N, t.tolerable())
	if held.N > t.d.Stabilised {
		t.d.Stabilised = held.N
		left := time.Duration(t.p.Hold) - t.now.Sub(held.At)
		t.note(NoteHold, float64(held.N), math.Ceil(left.Seconds()), 0)
	}
	if n, left := t.begun(); n > t.d.Stabilised {
		t.d.Stabilised = n
		t.note(NoteBegun, float64(n), math.Ceil(left.Seconds()), 0)
	}
	t.keepWanted()
	if full := t.almostFull(); t.d.Stabilised < full {
		t.d.Stabilised = full
		t.note(NoteFull, float64(full), float64(t.o.Running), 0)
	}
	if t.d.Stabilised == 0 {
		t.keepOne()
	}
}

// begun is how many instances there were when decisions began to be applied, as long as they are held, and for how long
// they will be. Nothing was known then of what they had done: the hour before may have needed all of them.
func (t *decider) begun() (n int, left time.Duration) {
	left = time.Duration(t.p.Hold) - t.now.Sub(t.s.Begun.At)
	if t.s.Begun.At.IsZero() || left <= 0 {
		return 0, 0
	}
	return min(t.s.Begun.N, t.s.Desired), left
}

// unhealthyFor is how long instances are unhealthy before others are started for them.
const unhealthyFor = 30 * time.Second

// coverUnhealthy adds as many instances as have been unhealthy all the while, at most half as many as are needed, so
// that probes that fail everywhere do not double the number. After a gap in the observations none has been.
func (t *decider) coverUnhealthy() {
	last := len(t.s.Unhealthy) - 1
	if last < 0 || t.now.Sub(t.s.Unhealthy[last].At) > unhealthyFor {
		t.s.Unhealthy = []Level{{At: t.now}}
	}
	t.s.Unhealthy = pushLevel(t.s.Unhealthy, Level{At: t.now, N: -t.o.Unhealthy}, t.now.Add(-unhealthyFor))
	n := min(-t.s.Unhealthy[0].N, (t.d.Stabilised+1)/2)
	if n > 0 {
		t.d.Stabilised += n
		t.note(NoteUnhealthy, float64(t.o.Unhealthy), 0, 0)
	}
}

// keptShare is the share of a cold start for which a number that was wanted is kept. Without it a backlog that comes
// and goes starts instances and gives them up before they are ready: their cost is paid and their use is lost.
const keptShare = 0.5

// keepWanted does not give up what was wanted a moment ago, by a surge or by the base.
func (t *decider) keepWanted() {
	kept := time.Duration(keptShare * t.coldStart() * float64(time.Second))
	t.s.Wanted = pushLevel(t.s.Wanted, Level{At: t.now, N: t.d.Raw}, t.now.Add(-kept))
	if level := min(t.s.Wanted[0].N, t.s.Desired); level > t.d.Stabilised {
		t.note(NoteWanted, float64(level), kept.Seconds(), 0)
		t.d.Stabilised = level
	}
}

// almostFull is the least level, not above the present one, at which what runs uses at most heldShare.
func (t *decider) almostFull() int {
	level := int(math.Floor(float64(t.o.Running)/(heldShare*t.slots))) + 1
	if t.o.Running == 0 || level < 2 {
		return 0
	}
	return min(level, t.s.Desired)
}

// keepOne keeps the last instance while the idle time that the next request would cost is cheaper than
// the cold start that it would wait for: requests arrive at Recent / 30 min, and a second of a cold start
// is worth ColdPrice seconds of an idle instance.
func (t *decider) keepOne() {
	if t.s.LastUse.IsZero() || t.s.Desired == 0 {
		return
	}
	idle := t.now.Sub(t.s.LastUse)
	worth := t.worth(t.s.Recent)
	if idle >= time.Duration(t.p.IdleMax) || idle >= time.Duration(t.p.IdleMin) && worth < 1 {
		return
	}
	t.d.Stabilised = 1
	t.note(NoteIdle, idle.Seconds(), t.keepFor().Seconds(), 0)
}

// worth is how many cold starts an instance spares that is there for the next request, as many as came within the last
// 30 minutes, against the price of an idle one.
func (t *decider) worth(recent float64) float64 {
	return recent / recentSeconds * t.p.ColdPrice * t.coldStart()
}

// keepFor is how long the last instance is kept after the last request, as things are.
func (t *decider) keepFor() time.Duration {
	idle := t.now.Sub(t.s.LastUse)
	worth := t.worth(t.s.Recent)
	keep := idle
	if worth > 0 {
		keep += time.Duration(recentSeconds * math.Log(worth) * float64(time.Second))
	}
	return min(max(keep, time.Duration(t.p.IdleMin)), time.Duration(t.p.IdleMax))
}

// pushLevel adds a level to a window whose first element is its maximum, and drops what is older than
// since: a monotonic queue. Levels that a later and higher one covers are not kept. The window that is
// given stays as it is.
func pushLevel(window []Level, level Level, since time.Time) []Level {
	first := 0
	for first < len(window) && !window[first].At.After(since) {
		first++
	}
	kept := len(window)
	for kept > first && window[kept-1].N <= level.N {
		kept--
	}
	next := make([]Level, 0, kept-first+1)
	next = append(next, window[first:kept]...)
	return append(next, level)
}
