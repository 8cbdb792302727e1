package scale

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func drawPolicy(t *rapid.T) Policy {
	p := Policy{
		Algorithm: rapid.SampledFrom([]Method{Penstock, ReplicateV2, HPA, Utilization}).Draw(t, "algorithm"),
		Slots:     rapid.SampledFrom([]int{1, 4, 32}).Draw(t, "slots"),
		Max:       rapid.IntRange(1, 60).Draw(t, "max"),
	}
	p.Min = rapid.IntRange(0, p.Max).Draw(t, "min")
	return p
}

func drawObs(t *rapid.T, at time.Time) Obs {
	o := Obs{
		Waiting: rapid.IntRange(0, 500).Draw(t, "waiting"), Running: rapid.IntRange(0, 50).Draw(t, "running"),
		Due: rapid.IntRange(0, 1).Draw(t, "due"), Arrived: float64(rapid.IntRange(0, 50).Draw(t, "arrived")),
		Refused: float64(rapid.IntRange(0, 5).Draw(t, "refused")),
		Service: rapid.Float64Range(0, 60).Draw(t, "service"), ColdStart: rapid.Float64Range(0, 300).Draw(t, "cold"),
		Ready: rapid.IntRange(0, 20).Draw(t, "ready"), Unhealthy: rapid.IntRange(0, 2).Draw(t, "unhealthy"),
		PerMin: rapid.Float64Range(0, 100).Draw(t, "per minute"), Busy: rapid.Float64Range(0, 9999).Draw(t, "busy"),
		LastRequest: at.Add(-rapid.SampledFrom([]time.Duration{0, time.Minute, 3 * time.Hour}).Draw(t, "last")),
	}
	o.Urgent = rapid.IntRange(0, o.Waiting).Draw(t, "urgent")
	o.Late = rapid.IntRange(0, 2*o.Waiting).Draw(t, "late")
	for range rapid.IntRange(0, 5).Draw(t, "starting") {
		o.Starting = append(o.Starting, at.Add(-time.Duration(rapid.IntRange(0, 2000).Draw(t, "age"))*time.Second))
	}
	return o
}

// A walk is some minutes of arbitrary observations.
func walk(t *rapid.T, p Policy, step func(now time.Time, o Obs, before, after State, d Decision)) {
	now, s := noon, State{}
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		now = now.Add(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
		o := drawObs(t, now)
		d, next := Decide(now, p, o, s)
		step(now, o, s, next, d)
		s = next
	}
}

func TestUnracedDecideIsDeterministicAndWritesToNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		walk(t, p, func(now time.Time, o Obs, before, after State, d Decision) {
			text, err := json.Marshal(before)
			if err != nil {
				t.Fatal(err)
			}
			var stored State
			if err := json.Unmarshal(text, &stored); err != nil {
				t.Fatal(err)
			}
			again, next := Decide(now, p, o, before)
			if !reflect.DeepEqual(again, d) || !reflect.DeepEqual(next, after) {
				t.Fatalf("a second time: %s, not %s", again.Explain(), d.Explain())
			}
			again, _ = Decide(now, p, o, stored)
			if again.Desired != d.Desired {
				t.Fatalf("from the stored state: %s, not %s", again.Explain(), d.Explain())
			}
		})
	})
}

// Whatever is switched, there is a decision: a panic would end the leader, and the next one.
func TestEverySwitchAndModeHasADecision(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		p.Mode = rapid.SampledFrom([]Mode{Disabled, Manual, UpOnly, Full, Advise}).Draw(t, "mode")
		override := rapid.IntRange(0, 50).Draw(t, "override")
		now, s := noon, State{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
			o := drawObs(t, now)
			slices.SortFunc(o.Starting, time.Time.Compare)
			o.Switches.Off = rapid.IntRange(0, 4).Draw(t, "off") == 0
			if rapid.Bool().Draw(t, "overridden") {
				o.Switches.Override, o.Switches.OverrideUntil = &override, now.Add(time.Minute)
			}
			d, next := Decide(now, p, o, s)
			if d.Desired < 0 || next.Desired != d.Desired {
				t.Fatalf("%d and %d desired: %s", d.Desired, next.Desired, d.Explain())
			}
			s = next
		}
	})
}

func TestEachChangeHasAReason(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		walk(t, drawPolicy(t), func(_ time.Time, _ Obs, _, _ State, d Decision) {
			if d.Desired != d.Current && len(d.Notes) == 0 {
				t.Fatalf("no reason: %s", d.Explain())
			}
		})
	})
}

func TestUnracedDesiredStaysWithinBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		walk(t, p, func(_ time.Time, o Obs, _, s State, d Decision) {
			blocked := s.Stuck[""].Blocked
			most := max(p.Max, d.Current) // more, where there are more at first
			if d.Desired > most || d.Desired < p.Min && !blocked || d.Desired < 0 {
				t.Fatalf("%d is not within %d and %d: %s", d.Desired, p.Min, most, d.Explain())
			}
			for _, note := range d.Notes {
				if text := note.String(); strings.Contains(text, "%!") || text == string(note.Code) {
					t.Fatalf("reason %s has the text %q", note.Code, text)
				}
			}
		})
	})
}

func TestUnracedMoreBacklogNeverAsksForLess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		p.Algorithm = Penstock
		walk(t, p, func(now time.Time, o Obs, s, _ State, d Decision) {
			o.Waiting += rapid.IntRange(1, 300).Draw(t, "more")
			more, _ := Decide(now, p, o, s)
			if more.Desired < d.Desired {
				t.Fatalf("with more waiting: %s\nnot %s", more.Explain(), d.Explain())
			}
		})
	})
}

// However many entries of queues are too late, a caller at a gateway is not.
func TestACallerAtAGatewayWakesAModelAtZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		p.Algorithm = Penstock
		late := rapid.IntRange(0, 1000).Draw(t, "late")
		waiting := rapid.IntRange(0, 500).Draw(t, "waiting")
		urgent := rapid.IntRange(1, 50).Draw(t, "urgent")
		o := Obs{Waiting: waiting + urgent, Late: late, Urgent: urgent, Gateway: true}
		d, _ := Decide(noon, p, o, State{At: ago(time.Second), Counted: ago(time.Second)})
		if d.Desired == 0 {
			t.Fatalf("%d wait at gateways: %s", urgent, d.Explain())
		}
	})
}

// The number grows in any 15 s to at most twice or four more.
func TestUnracedRatesHoldOverAnyWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Policy{Slots: 4, Max: 200}
		var history []Level
		walk(t, p, func(now time.Time, o Obs, before, _ State, d Decision) {
			if d.Apply && !before.Stuck[""].Blocked {
				for _, past := range history {
					checkRate(t, past, Level{At: now, N: d.Desired}, d)
				}
			}
			history = append(history, Level{At: now, N: d.Desired})
		})
	})
}

func checkRate(t *rapid.T, past, now Level, d Decision) {
	age := now.At.Sub(past.At)
	if age < upPeriod && now.N > past.N+max(upCount, past.N) {
		t.Fatalf("from %d to %d in %v: %s", past.N, now.N, age, d.Explain())
	}
	blocked := strings.Contains(d.Explain(), "blocked")
	if age < downPeriod && !blocked && now.N < past.N-min(downCount, (past.N+1)/2) {
		t.Fatalf("from %d down to %d in %v: %s", past.N, now.N, age, d.Explain())
	}
}

// Sources that are too old permit no way down. What waits in queues is known meanwhile, and may start instances.
func TestOldSourcesPermitNoWayDown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		now, s := noon, State{}
		_, s = Decide(now, p, drawObs(t, now), s)
		for range 10 {
			now = now.Add(10 * time.Second)
			o := drawObs(t, now)
			o.Ages = Ages{Gateway: secs(60), Instances: secs(60)}
			d, next := Decide(now, p, o, s)
			if d.Desired < s.Desired {
				t.Fatalf("old input lowered %d to %d: %s", s.Desired, d.Desired, d.Explain())
			}
			s = next
		}
	})
}

func TestConstantLoadConvergesAndStays(t *testing.T) {
	for _, slots := range []int{1, 4, 16} {
		for _, rate := range []float64{0.5, 3, 20} {
			t.Run(fmt.Sprintf("%d slots, %g a second", slots, rate), func(t *testing.T) {
				const service = 2.0
				p, now, s := Policy{Slots: slots, Max: 100}, noon, State{}
				ready, changes := 0, 0
				for second := range 3600 {
					now = now.Add(time.Second)
					running := min(int(rate*service+0.5), ready*slots)
					o := Obs{
						Arrived: rate, Running: running, Waiting: int(rate*service+0.5) - running, Ready: ready,
						Service: service, ColdStart: 60, ColdStartP95: 60, LastRequest: now,
					}
					var d Decision
					d, s = Decide(now, p, o, s)
					if second > 1800 && d.Desired != ready {
						changes++
					}
					ready = d.Desired
				}
				need := rate * service / float64(slots)
				if changes > 0 || float64(ready) < need || float64(ready) > 2*need+2 {
					t.Errorf("%d instances for a need of %.1f, %d changes in the last half hour", ready, need, changes)
				}
			})
		}
	}
}

func TestABatchQueueGrowsLittleByABurst(t *testing.T) {
	p := Policy{Slots: 4, Max: 100, SLO: secs(4 * 3600), Tolerated: 0.02}
	o := Obs{
		Waiting: 50_000, Arrived: 50_000, Running: 4, Ready: 1, Service: 2, ColdStart: 60, LastRequest: noon,
	}
	d, _ := Decide(noon, p, o, State{At: ago(time.Second), Counted: ago(time.Second), Desired: 1, WasReady: noon})
	if d.Desired < 2 || d.Desired > 12 {
		t.Errorf("%d instances: %s", d.Desired, d.Explain())
	}
}

func TestPolicyIsCheckedFieldByField(t *testing.T) {
	for name, p := range map[string]Policy{
		"min": {Min: -1}, "max": {Max: 1401}, "above": {Min: 5, Max: 4}, "slo": {SLO: -1}, "rho": {Rho: 2},
		"price": {ColdPrice: -1}, "tolerated": {Tolerated: 2}, "algorithm": {Algorithm: "magic"},
	} {
		if err := p.Check(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := (Policy{}).WithDefaults().Check(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

func TestExplainNamesTheChangeAndItsReasons(t *testing.T) {
	o, s := quiet(3)
	o.Waiting, o.Running, s.Rate = 900, 12, 4
	d, _ := Decide(noon, four(), o, s)
	const want = "3 -> 7: the backlog needs 9: 900 wait, with 1800 slot-seconds of work; 9 wanted, no more than 7 now: growth is limited"
	if got := d.Explain(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// BenchmarkDecideThousandDeployments decides once for 1,000 deployments that have been busy for twenty minutes.
func BenchmarkDecideThousandDeployments(b *testing.B) {
	p := Policy{Slots: 4, Max: 60}
	o, s := quiet(3)
	o.Waiting, o.Running, o.Arrived = 40, 12, 8
	now := noon
	for range 1200 {
		now = now.Add(time.Second)
		_, s = Decide(now, p, o, s)
	}
	now = now.Add(time.Second)
	for b.Loop() {
		for range 1000 {
			Decide(now, p, o, s)
		}
	}
}
