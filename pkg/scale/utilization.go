package scale

import "time"

// UtilizationPolicy has the constants of Workers AI's ai-scheduler and its three variants: request counts
// (the default), a dead band around busy seconds, and bounds with a forecast.
type UtilizationPolicy struct {
	Variant  string  `json:"variant,omitempty"`           // count, band or bounds; default count
	Factor   float64 `json:"factor,omitempty"`            // default 0.8 for count, 1.2 at least for band
	Lowest   float64 `json:"min_utilization,omitempty"`   // default 0.3
	Highest  float64 `json:"max_utilization,omitempty"`   // default 0.8
	Scale    float64 `json:"utilization_scale,omitempty"` // default 1
	Forecast bool    `json:"use_forecast,omitempty"`      // take the larger of now and this time last week
	OutOfCap bool    `json:"use_out_of_cap,omitempty"`    // count refused requests, at most twice
	Period   Seconds `json:"period_seconds,omitempty"`    // default 5 min
	DownMax  int     `json:"down_max,omitempty"`          // instances a cycle; default 10
}

func (p UtilizationPolicy) withDefaults() UtilizationPolicy {
	set(&p.Variant, "count")
	set(&p.Factor, 0.8)
	set(&p.Lowest, 0.3)
	set(&p.Highest, 0.8)
	set(&p.Scale, 1)
	set(&p.Period, Seconds(5*time.Minute))
	set(&p.DownMax, 10)
	if p.Variant == "band" {
		p.Factor = max(p.Factor, 1.2)
	}
	return p
}

// utilization decides every five minutes. Its loads are means, which are zero while what arrived before still waits. So
// zero is not left to them: work keeps one instance, or begins one without waiting for a cycle.
func (t *decider) utilization() {
	t.utilizationCycle()
	if t.d.Desired == 0 && t.work() > 0 {
		t.d.Desired = 1
		t.note(NotePending, float64(t.work()), 0, 0)
	}
	t.zero()
}

func (t *decider) utilizationCycle() {
	p := t.p.Utilization.withDefaults()
	t.d.Stabilised = t.s.Desired
	if !t.due(time.Duration(p.Period)) {
		t.d.Raw = t.s.Desired
		return
	}
	switch p.Variant {
	case "band":
		t.d.Raw = t.inBand(p)
	case "bounds":
		t.d.Raw = t.withinBounds(p)
	default:
		t.d.Raw = ceil(t.o.PerMin * p.Factor)
		t.note(NoteLoad, t.o.PerMin, p.Factor, 0)
	}
	t.d.Stabilised = max(t.d.Raw, t.s.Desired-p.DownMax)
	if t.d.Stabilised > t.d.Raw {
		t.note(NoteRateDown, float64(t.d.Raw), float64(t.d.Stabilised), 0)
	}
	t.d.Desired = t.d.Stabilised
}

// load is the number of instances that the busy seconds of a minute fill.
func (t *decider) load(p UtilizationPolicy) float64 {
	busy := t.o.Busy
	if p.Forecast || p.Variant == "band" {
		busy = max(busy, t.o.Forecast)
	}
	return busy / 60 / t.slots
}

// inBand leaves the number alone between 1 / (factor + 0.15) and 1 / factor.
func (t *decider) inBand(p UtilizationPolicy) int {
	load := t.load(p)
	used := load / float64(max(1, t.s.Desired))
	if used >= 1/(p.Factor+0.15) && used <= 1/p.Factor {
		t.note(NoteDeadBand, used, 1/(p.Factor+0.15), 1/p.Factor)
		return t.s.Desired
	}
	t.note(NoteLoad, used, p.Factor, 0)
	return ceil(load * p.Factor)
}

// withinBounds compares what healthy instances use with the upper bound, and what requested ones would
// use with the lower one.
func (t *decider) withinBounds(p UtilizationPolicy) int {
	load := t.load(p) * p.Scale
	if p.OutOfCap && t.o.Refused > 0 {
		served := max(t.o.Arrived, 0.1)
		load *= min((served+t.o.Refused)/served, 2)
		t.note(NoteOutOfCap, t.o.Refused, served, 0)
	}
	healthy := max(1, t.o.Ready)
	up := load / float64(healthy)
	down := load / float64(max(1, t.s.Desired))
	switch {
	case up > p.Highest:
		t.note(NoteLoad, up, p.Highest, 0)
		return max(t.s.Desired, ceil(load/p.Highest))
	case down < p.Lowest:
		t.note(NoteLoad, down, p.Lowest, 0)
		return min(t.s.Desired, ceil(load/p.Lowest))
	case t.o.Unhealthy > 1:
		t.note(NoteUnhealthy, float64(t.o.Unhealthy), 0, 0)
		return max(0, t.s.Desired-1)
	}
	t.note(NoteDeadBand, up, p.Lowest, p.Highest)
	return t.s.Desired
}
