package scale

import (
	"cmp"
	"slices"
	"sort"
)

// Share is one deployment of a model: own machines, spot machines, external capacity.
type Share struct {
	Name     string
	Order    int     // filled first, before cost is compared
	Cost     float64 // of an instance an hour
	Min, Max int
	Mode     Mode
	Current  int
	Blocked  bool // starts fail, or there is no room for them: no more than Kept, and Tries
	Kept     int  // instances of a blocked deployment that are ready, were ready, or are about to be
	Tries    int  // starts by which a blocked deployment finds out whether they succeed again
	Absent   int  // instances of Current that neither serve nor are about to: they do not count towards n
}

// Spread divides n instances of a model among its deployments: filled in order and by cost, given up from
// the dearest. A deployment that may not change keeps its number, which counts towards n but for those that are
// Absent. One that is blocked keeps the instances that it has, and the next one is asked for the rest. Its tries come
// in addition to n: until one of them is ready, no other deployment gives up an instance for them.
func Spread(n int, shares []Share) map[string]int {
	ordered := slices.Clone(shares)
	slices.SortStableFunc(ordered, func(a, b Share) int {
		return cmp.Or(cmp.Compare(a.Order, b.Order), cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Name, b.Name))
	})
	result := make(map[string]int, len(shares))
	for _, s := range ordered {
		result[s.Name] = s.least()
		n -= s.least() - s.Absent
	}
	for _, s := range ordered {
		more := min(max(n, 0), s.most()-result[s.Name])
		result[s.Name] += max(more, 0)
		n -= max(more, 0)
		if s.mayTry() {
			result[s.Name] += max(0, min(s.Tries, n, s.Max-result[s.Name]))
		}
	}
	return result
}

func (s Share) least() int {
	switch s.Mode {
	case Disabled, Manual:
		return s.Current
	case UpOnly:
		return min(max(s.Current, s.Min), s.most())
	}
	return min(s.Min, s.most())
}

func (s Share) mayTry() bool { return s.Blocked && s.Mode != Disabled && s.Mode != Manual }

func (s Share) most() int {
	if s.Mode == Disabled || s.Mode == Manual {
		return s.Current
	}
	most := max(s.Max, 0)
	if s.Mode == UpOnly {
		most = max(most, s.Current)
	}
	if s.Blocked {
		most = min(most, s.Kept)
	}
	return most
}

// Claim is the demand of a deployment on a budget.
type Claim struct {
	Name    string
	Cost    float64 // of an instance an hour
	Current int
	Desired int
	Floor   int // instances that the budget does not take away
}

// Fit lowers desired numbers until their cost an hour is within the budget. Growth is given up
// first, one instance after another, from the first of the claims that want most beyond their present numbers; then
// instances above the floors. A budget of 0 is none. Floors are kept even where they alone exceed the budget. It takes
// time for each claim and not for each instance that is given up.
func Fit(budget float64, claims []Claim) map[string]int {
	result := make(map[string]int, len(claims))
	for _, c := range claims {
		result[c.Name] = c.Desired
	}
	if budget <= 0 {
		return result
	}
	lower(budget, claims, result, func(c Claim) int { return max(c.Current, c.Floor) })
	lower(budget, claims, result, func(c Claim) int { return c.Floor })
	return result
}

// lower takes instances above the least numbers of claims until the cost is within the budget. As those that want most
// give up one each in turn, all that want more come down to the same height above their least numbers: it is searched
// for, and only the last round is made one by one.
func lower(budget float64, claims []Claim, numbers map[string]int, least func(Claim) int) {
	n := make([]int, len(claims))
	at := func(i, height int) int {
		if bottom := least(claims[i]); claims[i].Cost > 0 && n[i] > bottom {
			return min(n[i], bottom+height)
		}
		return n[i]
	}
	cost := func(height int) (sum float64) {
		for i, c := range claims {
			sum += float64(at(i, height)) * c.Cost
		}
		return sum
	}
	highest := 0
	for i, c := range claims {
		n[i] = numbers[c.Name]
		highest = max(highest, n[i]-least(c))
	}
	// The least height whose cost is over the budget; all are lowered to it, and some of them by one more.
	height := sort.Search(highest, func(height int) bool { return cost(height) > budget })
	left := cost(height)
	for i, c := range claims {
		n[i], numbers[c.Name] = at(i, height), at(i, height)
	}
	for i, c := range claims {
		if left <= budget {
			return
		}
		if lowered := at(i, height-1); height > 0 && lowered < n[i] {
			numbers[c.Name] = lowered
			left -= c.Cost
		}
	}
}
