package scale

import (
	"math"
	"time"
)

// ReplicatePolicy has the constants of Replicate's second algorithm.
type ReplicatePolicy struct {
	Target     float64 `json:"target,omitempty"`             // backlog of one instance; default: its slots
	Headroom   float64 `json:"headroom,omitempty"`           // added to the backlog; default 0
	Computing  bool    `json:"computing,omitempty"`          // count running requests too
	Hysteresis float64 `json:"hysteresis,omitempty"`         // default 0.02
	OutWindow  Seconds `json:"out_window_seconds,omitempty"` // default 30 s
	InWindow   Seconds `json:"in_window_seconds,omitempty"`  // default 2 min
	OutCount   int     `json:"out_count,omitempty"`          // a minute, or as many again as there were; default 5
	IdleDelay  Seconds `json:"idle_delay_seconds,omitempty"` // to zero; default 5 min
}

func (p ReplicatePolicy) withDefaults(slots int) ReplicatePolicy {
	set(&p.Target, float64(slots))
	set(&p.Hysteresis, 0.02)
	set(&p.OutWindow, Seconds(30*time.Second))
	set(&p.InWindow, Seconds(2*time.Minute))
	set(&p.OutCount, 5)
	set(&p.IdleDelay, Seconds(5*time.Minute))
	return p
}

// replicate is desired = current x metric / target, where the metric is the backlog of one instance. The
// least recommendation of the last 30 s may raise it, the highest one of the last 2 min may lower it.
func (t *decider) replicate() {
	p := t.p.Replicate.withDefaults(t.p.Slots)
	backlog := float64(t.o.Waiting) + p.Headroom
	if p.Computing {
		backlog += float64(t.o.Running)
	}
	current := float64(max(1, t.s.Desired))
	ratio := backlog / current / p.Target
	wanted := t.s.Desired
	if math.Abs(ratio-1) > p.Hysteresis {
		wanted = ceil(current*ratio - 1e-9)
		t.note(NoteRatio, ratio, float64(wanted), 0)
	} else {
		t.note(NoteTolerance, ratio, p.Hysteresis, 0)
	}
	t.d.Raw = wanted
	t.d.Stabilised = t.stabilise(wanted, p)
	t.d.Desired = t.d.Stabilised
	if t.d.Desired > t.s.Desired {
		t.limitUp(t.upLimit(p.OutCount, time.Minute), NoteRateUp)
		t.slowStart()
	}
	t.keepRunning()
	t.idle(time.Duration(p.IdleDelay))
}

// stabilise takes the recommendations of both windows. The state keeps one a second at most.
func (t *decider) stabilise(wanted int, p ReplicatePolicy) int {
	oldest := t.now.Add(-time.Duration(max(p.InWindow, p.OutWindow)))
	window := make([]Level, 0, len(t.s.Window)+1)
	for _, level := range t.s.Window {
		if level.At.After(oldest) {
			window = append(window, level)
		}
	}
	window = append(window, Level{At: t.now, N: wanted})
	t.s.Window = window
	most, least := wanted, wanted
	for _, level := range window {
		age := t.now.Sub(level.At)
		if age < time.Duration(p.InWindow) {
			most = max(most, level.N)
		}
		if age < time.Duration(p.OutWindow) {
			least = min(least, level.N)
		}
	}
	switch {
	case t.s.Desired == 0 && t.work() > 0:
		return max(1, least)
	case least > t.s.Desired:
		return least
	case most < t.s.Desired:
		t.note(NoteWindow, float64(most), p.InWindow.Float(), 0)
		return most
	}
	return t.s.Desired
}

// idle keeps the last instance until the last request is older than delay.
func (t *decider) idle(delay time.Duration) {
	if t.d.Desired > 0 {
		return
	}
	idle := t.now.Sub(t.s.LastUse)
	switch {
	case !*t.p.ScaleToZero || t.o.Switches.ZeroOff:
		t.keep(NoteZeroOff)
	case t.work() > 0:
		t.d.Desired = 1
		t.note(NotePending, float64(t.work()), 0, 0)
	case t.s.LastUse.IsZero():
		t.keep(NoteLastRequest)
	case t.s.Desired > 0 && idle < delay:
		t.d.Desired = 1
		t.note(NoteIdle, idle.Seconds(), delay.Seconds(), 0)
	case t.s.Desired > 0:
		t.note(NoteZero, idle.Seconds(), 0, 0)
	}
}
