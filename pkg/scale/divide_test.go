package scale

import (
	"maps"
	"testing"
)

func TestDivideFillsTheCheapestFirst(t *testing.T) {
	own := part{Name: "own", Cost: 1, Max: 4}
	spot := part{Name: "spot", Cost: 0.5, Max: 2}
	external := part{Name: "external", Order: 1, Cost: 0.1, Max: 10}
	with := func(s part, change func(*part)) part { change(&s); return s }
	for _, c := range []struct {
		name        string
		n           int
		deployments []part
		want        map[string]int
	}{
		{"by cost", 3, []part{own, spot, external}, map[string]int{"spot": 2, "own": 1, "external": 0}},
		{"order before cost", 9, []part{own, spot, external}, map[string]int{"spot": 2, "own": 4, "external": 3}},
		{"more than all take", 99, []part{own, spot, external}, map[string]int{"spot": 2, "own": 4, "external": 10}},
		{"minima come first", 2, []part{own, with(external, func(s *part) { s.Min = 1 })}, map[string]int{"own": 1, "external": 1}},
		{
			"blocked: the next is asked", 3,
			[]part{own, with(spot, func(s *part) { s.Blocked, s.Kept = true, 1 })},
			map[string]int{"spot": 1, "own": 2},
		},
		{
			"a try takes nothing from the next", 3,
			[]part{own, with(spot, func(s *part) { s.Blocked, s.Kept, s.Tries = true, 1, 1 })},
			map[string]int{"spot": 2, "own": 2},
		},
		{
			"nothing is tried that is not wanted", 1,
			[]part{own, with(spot, func(s *part) { s.Blocked, s.Kept, s.Tries = true, 1, 1 })},
			map[string]int{"spot": 1, "own": 0},
		},
		{
			"nothing is tried above the maximum", 3,
			[]part{own, with(spot, func(s *part) { s.Blocked, s.Kept, s.Tries = true, 2, 1 })},
			map[string]int{"spot": 2, "own": 1},
		},
		{
			"blocked and up-only: the next is asked for what did not start", 3,
			[]part{own, with(spot, func(s *part) { s.Mode, s.Current, s.Blocked, s.Kept = UpOnly, 2, true, 1 })},
			map[string]int{"spot": 1, "own": 2},
		},
		{
			"manual keeps its number", 5,
			[]part{own, with(spot, func(s *part) { s.Mode, s.Current = Manual, 7 })},
			map[string]int{"spot": 7, "own": 0},
		},
		{
			"up-only does not shrink", 0,
			[]part{own, with(spot, func(s *part) { s.Mode, s.Current = UpOnly, 2 })},
			map[string]int{"spot": 2, "own": 0},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := divide(c.n, c.deployments); !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
