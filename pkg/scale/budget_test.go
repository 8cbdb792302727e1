package scale

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestFitKeepsCostWithinTheBudget(t *testing.T) {
	a := demand{Name: "a", Cost: 2, Current: 2, Desired: 6, Floor: 1}
	b := demand{Name: "b", Cost: 1, Current: 4, Desired: 4, Floor: 1}
	for _, c := range []struct {
		name   string
		budget float64
		want   map[string]int
	}{
		{"no budget", 0, map[string]int{"a": 6, "b": 4}},
		{"enough", 16, map[string]int{"a": 6, "b": 4}},
		{"growth is given up first", 10, map[string]int{"a": 3, "b": 4}},
		{"then what is there", 5, map[string]int{"a": 1, "b": 2}},
		{"floors stay", 1, map[string]int{"a": 1, "b": 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := fit(c.budget, []demand{a, b}); !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// The budget takes nothing away that an operator or a schedule asks for.
func TestTheBudgetKeepsWhatIsAskedFor(t *testing.T) {
	eight, later := 8, noon.Add(time.Hour)
	for name, c := range map[string]struct {
		change func(*deploymentRow)
		want   int
	}{
		"full":          {func(*deploymentRow) {}, 5},
		"override":      {func(s *deploymentRow) { s.Override, s.OverrideUntil = &eight, &later }, 8},
		"override over": {func(s *deploymentRow) { s.Override, s.OverrideUntil = &eight, &noon }, 5},
		"manual":        {func(s *deploymentRow) { s.Mode = Manual }, 8},
		"up-only":       {func(s *deploymentRow) { s.Mode = UpOnly }, 7},
		"schedule": {func(s *deploymentRow) {
			s.policy.Floors = []Floor{{Cron: "* * * * *", Lasts: Seconds(time.Hour), Min: 6}}
		}, 6},
	} {
		s := deploymentRow{Name: "a", Cost: 1, Desired: 7, Mode: Full, policy: Policy{Min: 2}}
		c.change(&s)
		if got := affordable(5, map[string]int{"a": 8}, []deploymentRow{s}, noon)["a"]; got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// Where the budget has no room for both, instances are given up one by one for those that take their place, each when the
// one before is ready.
func TestInstancesAreReplacedOneByOneUnderABudget(t *testing.T) {
	own := deploymentRow{Name: "own", Model: "m", Cost: 1, FillOrder: 1, Mode: Full, Backend: backendWebhook, Desired: 10, Ready: 10}
	spot := deploymentRow{Name: "spot", Model: "m", Cost: 1, Mode: Full, Backend: backendWebhook}
	least := 10
	for round := range 30 {
		rows := []deploymentRow{spot, own}
		for i := range rows {
			rows[i].policy.Mode = Full
		}
		d := &modelDecision{in: input{Model: "m", Budget: 10, At: noon}, deployments: rows}
		d.Desired, d.Apply = 10, true
		d.parts, d.kept = shares(d.Desired, 0, rows, modelStarts{}, noon)
		limitByBudget([]*modelDecision{d}, map[string][]deploymentRow{"m": rows})
		if sum := d.parts["own"] + d.parts["spot"]; sum != 10 || d.Desired != 10 || len(d.Notes) > 0 {
			t.Fatalf("round %d: %v, %d desired, %v", round, d.parts, d.Desired, d.Notes)
		}
		spot.Ready, own.Ready = spot.Desired, d.parts["own"] // what was started in the round before is ready
		spot.Desired, own.Desired = d.parts["spot"], d.parts["own"]
		least = min(least, spot.Ready+own.Ready)
	}
	if spot.Ready != 10 || own.Desired != 0 || least < 9 {
		t.Errorf("%d are ready, %d of the other are left, %d served at least", spot.Ready, own.Desired, least)
	}
}

// greedyFit is what fit is defined by: one instance after another, from the first of the demands that want most.
func greedyFit(budget float64, demands []demand) map[string]int {
	result, cost := map[string]int{}, 0.0
	for _, c := range demands {
		result[c.Name] = c.Desired
		cost += float64(c.Desired) * c.Cost
	}
	lower := func(least func(demand) int) {
		for cost > budget {
			dearest, most := demand{}, 0
			for _, c := range demands {
				if over := result[c.Name] - least(c); c.Cost > 0 && over > most {
					dearest, most = c, over
				}
			}
			if most == 0 {
				return
			}
			result[dearest.Name]--
			cost -= dearest.Cost
		}
	}
	lower(func(c demand) int { return max(c.Current, c.Floor) })
	lower(func(c demand) int { return c.Floor })
	return result
}

func TestFitLowersOneAfterAnother(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		demands := make([]demand, rapid.IntRange(0, 6).Draw(t, "demands"))
		for i := range demands {
			demands[i] = demand{
				Name: fmt.Sprint(i), Cost: float64(rapid.IntRange(-1, 4).Draw(t, "cost")), // exact in both orders of addition
				Current: rapid.IntRange(0, 12).Draw(t, "current"), Desired: rapid.IntRange(0, 12).Draw(t, "desired"),
				Floor: rapid.IntRange(0, 12).Draw(t, "floor"),
			}
		}
		budget := float64(rapid.IntRange(1, 120).Draw(t, "budget"))
		if got, want := fit(budget, demands), greedyFit(budget, demands); !maps.Equal(got, want) {
			t.Fatalf("fit(%g, %+v): %v, want %v", budget, demands, got, want)
		}
	})
}

// BenchmarkFit is a thousand deployments that together want ten times their budget.
func BenchmarkFit(b *testing.B) {
	demands := make([]demand, 1000)
	for i := range demands {
		demands[i] = demand{Name: fmt.Sprint(i), Cost: 1 + float64(i%7)/4, Current: i % 5, Desired: 40 + i%60}
	}
	for b.Loop() {
		fit(12_000, demands)
	}
}
