package scale

import (
	"encoding/json"
	"math"
	"testing"
	"time"
)

// ahead is the state of a model with two instances, as it was stored while the clock was a day ahead.
func ahead(s State) State {
	tomorrow := noon.Add(24 * time.Hour)
	s.At, s.Counted, s.SeenAt, s.Since, s.LastUse, s.Synced, s.WasReady = tomorrow, tomorrow, tomorrow, tomorrow, tomorrow, tomorrow, tomorrow
	s.Held, s.Wanted = []Level{{At: tomorrow, N: 1}}, []Level{{At: tomorrow, N: 1}}
	s.Changes = []Step{{At: tomorrow, By: 2}}
	s.Seen, s.Late = 10, make([]float64, 20)
	return s
}

// After a clock that was ahead has been set right, decisions go on as with times of now: with finite numbers, up, and down.
func TestAClockThatWasAheadHoldsNothingUp(t *testing.T) {
	for _, algorithm := range []Method{Penstock, ReplicateV2, HPA, Utilization} {
		p := four(func(p *Policy) { p.Algorithm = algorithm })
		o, s := quiet(2)
		s = ahead(s)
		o.Waiting, o.Running, o.Arrived, o.PerMin = 400, 8, 50, 100
		stored, _ := json.Marshal(s)
		now, most := noon, 0
		for range 600 {
			var d Decision
			d, s = Decide(now, p, o, s)
			most, now = max(most, d.Desired), now.Add(time.Second)
			if _, err := json.Marshal([]any{d, s}); err != nil {
				t.Fatalf("%s: %v", algorithm, err)
			}
		}
		if most < 5 {
			t.Errorf("%s: no more than %d instances within ten minutes for 400 requests that wait", algorithm, most)
		}
		o = Obs{Ready: s.Desired, Service: 2, ColdStart: 60, LastRequest: noon.Add(24 * time.Hour)}
		for range 4 * 3600 {
			var d Decision
			d, s = Decide(now, p, o, s)
			o.Ready, now = d.Desired, now.Add(time.Second)
			o.LastRequest = noon.Add(24 * time.Hour)
			if algorithm != Penstock {
				break
			}
		}
		if algorithm == Penstock && s.Desired > 1 {
			t.Errorf("%d instances four hours after the last request", s.Desired)
		}
		if again, _ := json.Marshal(ahead(func() State { _, s := quiet(2); return s }())); string(again) != string(stored) {
			t.Errorf("%s: the state that was given has changed", algorithm)
		}
	}
}

// The past of a model is kept where its deployment was made while the clock was ahead, as where it was made before.
func TestADeploymentMadeWhileTheClockWasAheadHasAPast(t *testing.T) {
	before := past{state: State{At: ago(time.Second)}}
	for made, anew := range map[time.Duration]bool{-time.Hour: false, -time.Millisecond: true, time.Hour: false} {
		row := deploymentRow{At: noon, CreatedAt: noon.Add(made)}
		row.read()
		if got := before.outlived([]deploymentRow{row}); got != anew {
			t.Errorf("made at noon and %s: whether decisions begin anew is %t, want %t", made, got, anew)
		}
	}
}

// Whatever is reported or was stored, decisions are finite numbers within the bounds.
func TestExtremeNumbersAreCalculatedWith(t *testing.T) {
	for _, x := range []float64{1e308, -1e308, math.NaN(), math.Inf(1), math.Inf(-1), 5e-324} {
		for _, algorithm := range []Method{Penstock, ReplicateV2, HPA, Utilization} {
			for _, p := range []Policy{
				{Algorithm: algorithm, Slots: 4, Max: 20},
				{
					Algorithm: algorithm, Slots: 4, Max: 20, Beta: x, ColdPrice: x, Theta: x, Rho: x, Phi: x, Tolerated: x,
					HPA: HPAPolicy{Target: x, Tolerance: x}, Replicate: ReplicatePolicy{Target: x, Headroom: x, Hysteresis: x},
					Utilization: UtilizationPolicy{Variant: "bounds", Factor: x, Lowest: x, Highest: x, Scale: x, OutOfCap: true},
				},
			} {
				p, _ = p.nearest()
				o := Obs{
					Waiting: math.MaxInt, Running: math.MaxInt, Late: math.MinInt, Arrived: x, Online: x, Refused: x, Gateway: true,
					Service: x, ColdStart: x, ColdStartP95: x, Busy: x, PerMin: x, Forecast: x, Ready: 1,
				}
				s := State{
					At: ago(time.Second), Counted: ago(time.Second), SeenAt: ago(time.Second), Rate: x, Recent: x, Seen: x, Desired: math.MaxInt,
					Shadow: []float64{x, x}, Online: []float64{x}, Bare: []float64{x, x}, Late: []float64{x, x},
				}
				for i := range 3 {
					var d Decision
					d, s = Decide(noon.Add(time.Duration(i)*time.Second), p, o, s)
					if d.Desired < 0 || d.Desired > 20 || d.Raw > countMax || d.Base > 20 || d.Stabilised > countMax*2 {
						t.Fatalf("%g, %s: %+v", x, algorithm, d)
					}
					if _, err := json.Marshal([]any{d, s}); err != nil {
						t.Fatalf("%g, %s: %v", x, algorithm, err)
					}
				}
			}
		}
	}
}

// What a release before stored is read as near as it is allowed, and the reason is told. What is set is refused.
func TestAStoredPolicyIsReadLenientlyAndSetStrictly(t *testing.T) {
	for text, want := range map[string]func(Policy) bool{
		`{"max": 2000, "slots": 3}`:           func(p Policy) bool { return p.Max == maxInstances && p.Slots == 3 },
		`{"min": 9, "max": 4}`:                func(p Policy) bool { return p.Min == 4 && p.Max == 4 },
		`{"min": -1, "max": 4}`:               func(p Policy) bool { return p.Min == 0 && p.Max == 4 },
		`{"slots": "many", "max": 4}`:         func(p Policy) bool { return p.Slots == 0 && p.Max == 4 },
		`{"slo_seconds": 1e300, "max": 4}`:    func(p Policy) bool { return p.SLO == 0 && p.Max == 4 },
		`{"rho": 7, "beta": 1e308, "max": 4}`: func(p Policy) bool { return p.Rho == 1 && p.Beta == betaMax && p.Max == 4 },
		`{"hold_seconds": -5, "max": 4}`:      func(p Policy) bool { return p.Hold == 0 && p.Max == 4 },
		`{"algorithm": "oracle", "max": 4}`:   func(p Policy) bool { return p.Algorithm == "" && p.Max == 4 },
		`{"hpa": {"target": -3}, "max": 4}`:   func(p Policy) bool { return p.HPA.Target == 0 && p.Max == 4 },
		`{"max": 4, "floors": [{"cron": "x", "lasts_seconds": 1, "min": 1},
		             {"cron": "0 8 * * *", "lasts_seconds": 60, "min": 2}]}`: func(p Policy) bool { return p.Max == 4 && len(p.Floors) == 1 && p.Floors[0].Min == 2 },
	} {
		p, flaws := readPolicy([]byte(text))
		if !want(p) || len(flaws) == 0 {
			t.Errorf("%s is read as %+v, %q", text, p, flaws)
		}
		if err := p.Check(); err != nil {
			t.Errorf("%s is read as one that is not allowed: %v", text, err)
		}
		var strict Policy
		if err := json.Unmarshal([]byte(text), &strict); err == nil && strict.Check() == nil {
			t.Errorf("%s may be set", text)
		}
	}
	if _, flaws := readPolicy([]byte(`{"min": 1, "max": 4, "slots": 2}`)); len(flaws) > 0 {
		t.Errorf("%q", flaws)
	}
}
