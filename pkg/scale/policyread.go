package scale

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// readPolicy reads a stored policy. A value that Check refuses, as one that a release before allowed, counts as the
// nearest one that is allowed, a field that cannot be read as its default, and a floor that can never hold as none: the
// model goes on. flaws are sentences about these.
func readPolicy(text []byte) (p Policy, flaws []string) {
	if err := json.Unmarshal(text, &p); err != nil {
		p, flaws = readFields(text)
	}
	p, more := p.nearest()
	return p, append(flaws, more...)
}

// readFields reads a policy field by field.
func readFields(text []byte) (p Policy, flaws []string) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return p, []string{fmt.Sprintf("the policy cannot be read: %v", err)}
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		one, err := json.Marshal(map[string]json.RawMessage{name: fields[name]})
		next := p
		if err == nil {
			err = json.Unmarshal(one, &next)
		}
		if err != nil {
			flaws = append(flaws, fmt.Sprintf("%s is ignored: %v", name, err))
			continue
		}
		p = next
	}
	return p, flaws
}

// Bounds of numbers of a policy, beyond which they mean nothing.
const (
	betaMax  = 1000
	priceMax = 1e6
	ratioMax = 1e6
)

// nearest is the policy with each field in its range, and a sentence about each that was not.
func (p Policy) nearest() (Policy, []string) {
	var n nearest
	n.whole("min", &p.Min, maxInstances)
	n.whole("max", &p.Max, maxInstances)
	if p.Max > 0 {
		n.whole("min", &p.Min, p.Max)
	}
	n.whole("slots", &p.Slots, maxSlots)
	n.whole("slow_start", &p.SlowStart, countMax)
	n.whole("emergency_max", &p.EmergencyMax, countMax)
	n.number("theta", &p.Theta, 1)
	n.number("rho", &p.Rho, 1)
	n.number("phi", &p.Phi, 1)
	n.number("tolerated", &p.Tolerated, 1)
	n.number("beta", &p.Beta, betaMax)
	n.number("cold_price", &p.ColdPrice, priceMax)
	n.number("replicate.target", &p.Replicate.Target, countMax)
	n.number("replicate.headroom", &p.Replicate.Headroom, countMax)
	n.number("replicate.hysteresis", &p.Replicate.Hysteresis, ratioMax)
	n.whole("replicate.out_count", &p.Replicate.OutCount, countMax)
	n.number("hpa.target", &p.HPA.Target, countMax)
	n.number("hpa.tolerance", &p.HPA.Tolerance, ratioMax)
	n.number("utilization.factor", &p.Utilization.Factor, ratioMax)
	n.number("utilization.min_utilization", &p.Utilization.Lowest, ratioMax)
	n.number("utilization.max_utilization", &p.Utilization.Highest, ratioMax)
	n.number("utilization.utilization_scale", &p.Utilization.Scale, ratioMax)
	n.whole("utilization.down_max", &p.Utilization.DownMax, countMax)
	for name, d := range map[string]*Seconds{
		"slo_seconds": &p.SLO, "online_slo_seconds": &p.OnlineSLO, "drain_seconds": &p.Drain, "hold_seconds": &p.Hold,
		"idle_min_seconds": &p.IdleMin, "idle_max_seconds": &p.IdleMax, "stuck_min_seconds": &p.StuckMin,
		"blocked_for_seconds": &p.BlockedFor, "replicate.out_window_seconds": &p.Replicate.OutWindow,
		"replicate.in_window_seconds": &p.Replicate.InWindow, "replicate.idle_delay_seconds": &p.Replicate.IdleDelay,
		"hpa.period_seconds": &p.HPA.Period, "hpa.window_seconds": &p.HPA.Window,
		"hpa.cooldown_seconds":       &p.HPA.Cooldown,
		"utilization.period_seconds": &p.Utilization.Period,
	} {
		n.duration(name, d)
	}
	switch p.Algorithm {
	case "", Penstock, ReplicateV2, HPA, Utilization:
	default:
		n.flaw("algorithm %q is not known: penstock decides", p.Algorithm)
		p.Algorithm = ""
	}
	n.floors(&p)
	slices.Sort(n.flaws)
	return p, n.flaws
}

type nearest struct{ flaws []string }

func (n *nearest) flaw(format string, args ...any) {
	n.flaws = append(n.flaws, fmt.Sprintf(format, args...))
}

func (n *nearest) whole(name string, value *int, most int) {
	if near := min(max(*value, 0), most); near != *value {
		n.flaw("%s is %d: want 0 to %d, and it counts as %d", name, *value, most, near)
		*value = near
	}
}

func (n *nearest) number(name string, value *float64, most float64) {
	if near := within(*value, 0, most); near != *value {
		n.flaw("%s is %g: want 0 to %g, and it counts as %g", name, *value, most, near)
		*value = near
	}
}

func (n *nearest) duration(name string, value *Seconds) {
	if *value < 0 {
		n.flaw("%s is negative: it counts as the default", name)
		*value = 0
	}
}

func (n *nearest) floors(p *Policy) {
	var kept []Floor
	for i, f := range p.Floors {
		if err := f.check(); err != nil {
			n.flaw("floors[%d] is ignored: %v", i, err)
			continue
		}
		kept = append(kept, f)
	}
	p.Floors = kept
}
