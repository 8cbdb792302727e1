package scale

import (
	"cmp"
	"slices"
)

// Share is one deployment of a model: own machines, spot machines, external capacity.
type Share struct {
	Name     string
	Order    int     // filled first, before cost is compared
	Cost     float64 // of an instance an hour
	Min, Max int
	Mode     Mode
	Current  int
	Ready    int  // instances that take requests
	Blocked  bool // starts fail: no more than are ready
}

// Spread divides n instances of a model among its deployments: filled in order and by cost, given up from
// the dearest. A deployment that may not change keeps its number, which counts towards n; one that is
// blocked takes no more than are ready, and the next one is asked instead.
func Spread(n int, shares []Share) map[string]int {
	ordered := slices.Clone(shares)
	slices.SortStableFunc(ordered, func(a, b Share) int {
		return cmp.Or(cmp.Compare(a.Order, b.Order), cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Name, b.Name))
	})
	result := make(map[string]int, len(shares))
	for _, s := range ordered {
		result[s.Name] = s.least()
		n -= s.least()
	}
	for _, s := range ordered {
		more := min(max(n, 0), s.most()-result[s.Name])
		result[s.Name] += max(more, 0)
		n -= max(more, 0)
	}
	return result
}

func (s Share) least() int {
	switch s.Mode {
	case Disabled, Manual:
		return s.Current
	case UpOnly:
		return max(s.Current, s.Min)
	}
	return min(s.Min, s.most())
}

func (s Share) most() int {
	switch {
	case s.Mode == Disabled || s.Mode == Manual:
		return s.Current
	case s.Blocked && s.Mode == UpOnly:
		return s.Current
	case s.Blocked:
		return s.Ready
	}
	return max(s.Max, 0)
}

// Claim is what a deployment wants of a budget.
type Claim struct {
	Name    string
	Cost    float64 // of an instance an hour
	Current int
	Desired int
	Floor   int // instances that the budget does not take away
}

// Fit lowers desired numbers until their cost an hour is within the budget. Growth is given up first, from
// the claim that wants most beyond what it has; then instances above the floors. A budget of 0 is none.
// Floors are kept even where they alone exceed the budget.
func Fit(budget float64, claims []Claim) map[string]int {
	result := make(map[string]int, len(claims))
	cost := 0.0
	for _, c := range claims {
		result[c.Name] = c.Desired
		cost += float64(c.Desired) * c.Cost
	}
	if budget <= 0 {
		return result
	}
	lower := func(least func(Claim) int) {
		for cost > budget {
			dearest := Claim{}
			most := 0
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
