package scale

import (
	"math"
	"time"
)

// HPAPolicy has the constants of Kubernetes' horizontal pod autoscaler (autoscaling/v2).
type HPAPolicy struct {
	Target    float64 `json:"target,omitempty"`           // requests an instance; default: its slots
	Period    Seconds `json:"period_seconds,omitempty"`   // of its loop; default 15 s
	Tolerance float64 `json:"tolerance,omitempty"`        // default 0.1
	Window    Seconds `json:"window_seconds,omitempty"`   // of scale-in; default 300 s
	Cooldown  Seconds `json:"cooldown_seconds,omitempty"` // KEDA's, from 1 to 0; default 300 s
}

func (p HPAPolicy) withDefaults(slots int) HPAPolicy {
	set(&p.Target, float64(slots))
	set(&p.Period, Seconds(15*time.Second))
	set(&p.Tolerance, 0.1)
	set(&p.Window, Seconds(5*time.Minute))
	set(&p.Cooldown, Seconds(5*time.Minute))
	return p
}

// hpa is desired = ceil(waiting and running / target), within a tolerance, with the highest recommendation
// of the scale-in window; up by the larger of 4 and 100 % in 15 s. To zero and from it as with KEDA.
func (t *decider) hpa() {
	p := t.p.HPA.withDefaults(t.p.Slots)
	metric := float64(t.o.Waiting + t.o.Running)
	t.d.Raw = ceil(metric/p.Target - 1e-9)
	t.d.Stabilised = t.s.Desired
	if t.s.Desired == 0 {
		t.d.Stabilised = min(t.d.Raw, 1)
		t.d.Desired = t.d.Stabilised
		return
	}
	if !t.due(time.Duration(p.Period)) {
		return
	}
	idle := metric == 0 && t.s.Desired == 1 && t.now.Sub(t.s.LastUse) >= time.Duration(p.Cooldown)
	switch {
	case idle && t.o.Switches.ZeroOff:
		t.keep(NoteZeroOff)
	case idle && *t.p.ScaleToZero:
		t.note(NoteZero, t.now.Sub(t.s.LastUse).Seconds(), 0, 0)
		t.d.Desired, t.d.Stabilised = 0, 0
		return
	}
	wanted := max(1, t.d.Raw)
	if ratio := metric / (p.Target * float64(t.s.Desired)); math.Abs(ratio-1) <= p.Tolerance {
		t.note(NoteTolerance, ratio, p.Tolerance, 0)
		wanted = t.s.Desired
	}
	t.s.Window = pushLevel(t.s.Window, Level{At: t.now, N: wanted}, t.now.Add(-time.Duration(p.Window)))
	if held := t.s.Window[0].N; held > wanted {
		t.note(NoteWindow, float64(held), p.Window.Float(), 0)
		wanted = held
	}
	t.d.Stabilised, t.d.Desired = wanted, wanted
	if wanted > t.s.Desired {
		t.limitUp(t.upLimit(upCount, upPeriod), NoteRateUp)
	}
}

// due says whether a cycle begins, for algorithms that do not decide every second.
func (t *decider) due(period time.Duration) bool {
	if !t.s.Synced.IsZero() && t.now.Sub(t.s.Synced) < period {
		t.note(NoteNextCycle, (period - t.now.Sub(t.s.Synced)).Seconds(), 0, 0)
		return false
	}
	t.s.Synced = t.now
	return true
}
