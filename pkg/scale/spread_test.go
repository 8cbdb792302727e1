package scale

import (
	"maps"
	"slices"
	"testing"
	"time"
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
