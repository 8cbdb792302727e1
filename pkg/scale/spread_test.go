package scale

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestVictimsAreThoseWhoseRemovalCostsLeast(t *testing.T) {
	all := []Removable{
		{ID: "long run", Ready: true, Running: 1, Remaining: time.Hour},
		{ID: "short run", Ready: true, Running: 2, Remaining: time.Second},
		{ID: "idle and warm", Ready: true, Affinity: 3},
		{ID: "idle", Ready: true},
		{ID: "quarantined", Ready: true, Quarantined: true, Running: 1},
		{ID: "starting long", Started: noon},
		{ID: "starting", Started: noon.Add(time.Minute)},
		{ID: "draining", Draining: true},
	}
	want := []string{"starting", "starting long", "quarantined", "idle", "idle and warm", "short run", "long run"}
	for n := range len(all) + 2 {
		got := Victims(all, n)
		if !slices.Equal(got, want[:min(n, len(want))]) {
			t.Errorf("%d victims are %q, want %q", n, got, want[:min(n, len(want))])
		}
	}
}

func TestSpreadFillsTheCheapestFirst(t *testing.T) {
	own := Share{Name: "own", Cost: 1, Max: 4}
	spot := Share{Name: "spot", Cost: 0.5, Max: 2}
	external := Share{Name: "external", Order: 1, Cost: 0.1, Max: 10}
	with := func(s Share, change func(*Share)) Share { change(&s); return s }
	for _, c := range []struct {
		name   string
		n      int
		shares []Share
		want   map[string]int
	}{
		{"by cost", 3, []Share{own, spot, external}, map[string]int{"spot": 2, "own": 1, "external": 0}},
		{"order before cost", 9, []Share{own, spot, external}, map[string]int{"spot": 2, "own": 4, "external": 3}},
		{"more than all take", 99, []Share{own, spot, external}, map[string]int{"spot": 2, "own": 4, "external": 10}},
		{"minima come first", 2, []Share{own, with(external, func(s *Share) { s.Min = 1 })}, map[string]int{"own": 1, "external": 1}},
		{
			"blocked: the next is asked", 3,
			[]Share{own, with(spot, func(s *Share) { s.Blocked, s.Kept = true, 1 })},
			map[string]int{"spot": 1, "own": 2},
		},
		{
			"a try takes nothing from the next", 3,
			[]Share{own, with(spot, func(s *Share) { s.Blocked, s.Kept, s.Tries = true, 1, 1 })},
			map[string]int{"spot": 2, "own": 2},
		},
		{
			"nothing is tried that is not wanted", 1,
			[]Share{own, with(spot, func(s *Share) { s.Blocked, s.Kept, s.Tries = true, 1, 1 })},
			map[string]int{"spot": 1, "own": 0},
		},
		{
			"nothing is tried above the maximum", 3,
			[]Share{own, with(spot, func(s *Share) { s.Blocked, s.Kept, s.Tries = true, 2, 1 })},
			map[string]int{"spot": 2, "own": 1},
		},
		{
			"blocked and up-only: the next is asked for what did not start", 3,
			[]Share{own, with(spot, func(s *Share) { s.Mode, s.Current, s.Blocked, s.Kept = UpOnly, 2, true, 1 })},
			map[string]int{"spot": 1, "own": 2},
		},
		{
			"manual keeps its number", 5,
			[]Share{own, with(spot, func(s *Share) { s.Mode, s.Current = Manual, 7 })},
			map[string]int{"spot": 7, "own": 0},
		},
		{
			"up-only does not shrink", 0,
			[]Share{own, with(spot, func(s *Share) { s.Mode, s.Current = UpOnly, 2 })},
			map[string]int{"spot": 2, "own": 0},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Spread(c.n, c.shares); !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func TestFitKeepsCostWithinTheBudget(t *testing.T) {
	a := Claim{Name: "a", Cost: 2, Current: 2, Desired: 6, Floor: 1}
	b := Claim{Name: "b", Cost: 1, Current: 4, Desired: 4, Floor: 1}
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
			if got := Fit(c.budget, []Claim{a, b}); !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// greedyFit is what Fit is defined by: one instance after another, from the first of the claims that want most.
func greedyFit(budget float64, claims []Claim) map[string]int {
	result, cost := map[string]int{}, 0.0
	for _, c := range claims {
		result[c.Name] = c.Desired
		cost += float64(c.Desired) * c.Cost
	}
	lower := func(least func(Claim) int) {
		for cost > budget {
			dearest, most := Claim{}, 0
			for _, c := range claims {
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
	lower(func(c Claim) int { return max(c.Current, c.Floor) })
	lower(func(c Claim) int { return c.Floor })
	return result
}

func TestFitLowersOneAfterAnother(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		claims := make([]Claim, rapid.IntRange(0, 6).Draw(t, "claims"))
		for i := range claims {
			claims[i] = Claim{
				Name: fmt.Sprint(i), Cost: float64(rapid.IntRange(-1, 4).Draw(t, "cost")), // exact in both orders of addition
				Current: rapid.IntRange(0, 12).Draw(t, "current"), Desired: rapid.IntRange(0, 12).Draw(t, "desired"),
				Floor: rapid.IntRange(0, 12).Draw(t, "floor"),
			}
		}
		budget := float64(rapid.IntRange(1, 120).Draw(t, "budget"))
		if got, want := Fit(budget, claims), greedyFit(budget, claims); !maps.Equal(got, want) {
			t.Fatalf("Fit(%g, %+v): %v, want %v", budget, claims, got, want)
		}
	})
}

// BenchmarkFit is a thousand deployments that together want ten times their budget.
func BenchmarkFit(b *testing.B) {
	claims := make([]Claim, 1000)
	for i := range claims {
		claims[i] = Claim{Name: fmt.Sprint(i), Cost: 1 + float64(i%7)/4, Current: i % 5, Desired: 40 + i%60}
	}
	for b.Loop() {
		Fit(12_000, claims)
	}
}
