package scale

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// readPolicy reads a stored policy. A value that Check refuses, as one that a release before allowed, counts as the
// nearest one that is allowed, a field that cannot be read as its default, and a floor that can never hold as none: the
// model goes on. flaws are sentences about these.
func readPolicy(text []byte) (p Policy, flaws []string) {
	if err := json.Unmarshal(text, &p); err != nil {
		p, flaws = readFields(text)
	}
	p, found := p.nearest()
	for _, f := range found {
		flaws = append(flaws, f.problem+", and "+f.consequence)
	}
	return p, flaws
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

// flaw is a field that is out of its range, and what it counts as where it is stored.
type flaw struct{ problem, consequence string }

// nearest is the policy with each field in its range, and the flaws of those that were not.
func (p Policy) nearest() (Policy, []flaw) {
	var n nearest
	n.whole("min", &p.Min, maxInstances)
	n.whole("max", &p.Max, maxInstances)
	if p.Max > 0 && p.Min > p.Max {
		n.flaw(fmt.Sprintf("min %d is above max %d: lower min or raise max", p.Min, p.Max), "min counts as max")
		p.Min = p.Max
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
		n.flaw(fmt.Sprintf("algorithm %q: want penstock, replicate-v2, hpa or utilization", p.Algorithm),
			"penstock decides")
		p.Algorithm = ""
	}
	n.floors(&p)
	slices.SortFunc(n.flaws, func(a, b flaw) int { return strings.Compare(a.problem, b.problem) })
	return p, n.flaws
}

type nearest struct{ flaws []flaw }

func (n *nearest) flaw(problem, consequence string) {
	n.flaws = append(n.flaws, flaw{problem, consequence})
}

func (n *nearest) whole(name string, value *int, most int) {
	if near := min(max(*value, 0), most); near != *value {
		n.flaw(fmt.Sprintf("%s is %d: want 0 to %d", name, *value, most), fmt.Sprintf("it counts as %d", near))
		*value = near
	}
}

func (n *nearest) number(name string, value *float64, most float64) {
	if near := within(*value, 0, most); near != *value {
		n.flaw(fmt.Sprintf("%s is %g: want 0 to %g", name, *value, most), fmt.Sprintf("it counts as %g", near))
		*value = near
	}
}

func (n *nearest) duration(name string, value *Seconds) {
	if *value < 0 {
		n.flaw(name+" is negative", "it counts as the default")
		*value = 0
	}
}

func (n *nearest) floors(p *Policy) {
	var kept []Floor
	for i, f := range p.Floors {
		if err := f.check(); err != nil {
			n.flaw(fmt.Sprintf("floors[%d]: %v", i, err), "it is ignored")
			continue
		}
		kept = append(kept, f)
	}
	p.Floors = kept
}
