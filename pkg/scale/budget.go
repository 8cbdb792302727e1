package scale

import (
	"maps"
	"slices"
	"sort"
	"time"
)

// limitByBudget lowers what the deployments of all models get to the budget of the installation.
func limitByBudget(all []*modelDecision, byModel map[string][]deploymentRow) {
	if len(all) == 0 || all[0].in.Budget <= 0 {
		return
	}
	wanted := map[string]int{}
	for _, d := range all {
		for name, n := range d.parts {
			wanted[name] = n
		}
	}
	var deployments []deploymentRow
	for _, model := range slices.Sorted(maps.Keys(byModel)) {
		deployments = append(deployments, byModel[model]...)
	}
	left := affordable(all[0].in.Budget, wanted, deployments, all[0].in.At)
	for _, d := range all {
		for d.waitsForRoom(left) && d.yield(wanted) {
			left = affordable(all[0].in.Budget, wanted, deployments, all[0].in.At)
		}
	}
	for _, d := range all {
		cut := 0
		for name, n := range d.parts {
			cut += n - d.kept[name] - left[name] // what is kept is no part of the number of the model
			d.parts[name] = left[name]
		}
		if cut <= 0 {
			continue
		}
		d.Notes = append(d.Notes, Note{
			Code: NoteBudget, Args: [3]float64{float64(d.Desired - cut), float64(d.Desired)},
		})
		d.Desired -= cut
		d.next.Desired = d.Desired
		d.next.Changes = withoutGrowth(d.next.Changes, d.in.At, cut)
	}
}

// waitsForRoom says whether instances are kept until others are ready, and the budget has room for none of these
// others.
func (d *modelDecision) waitsForRoom(left map[string]int) bool {
	waits := false
	for _, s := range d.deployments {
		if left[s.Name] > s.Ready {
			return false
		}
		waits = waits || d.parts[s.Name] > s.Ready
	}
	return waits
}

// yield takes one instance that is kept from what is wanted, of the deployment that is filled last. It says whether
// there was one.
func (d *modelDecision) yield(wanted map[string]int) bool {
	for _, s := range slices.Backward(d.deployments) {
		if d.kept[s.Name] > 0 {
			d.kept[s.Name]--
			d.parts[s.Name]--
			wanted[s.Name]--
			return true
		}
	}
	return false
}

// withoutGrowth takes what a limit behind Decide left out from the last change.
func withoutGrowth(changes []Step, at time.Time, cut int) []Step {
	changes = slices.Clone(changes)
	if last := len(changes) - 1; last >= 0 && changes[last].At.Equal(at) {
		changes[last].By -= cut
	}
	return changes
}

// affordable lowers the numbers of all deployments to the budget. Minimums, those by schedule too, and numbers of
// operators are not taken away, nor what mode up-only has, nor is anything of a deployment that was not decided or
// may not change: its cost is a part of the budget. So is all that one may have whose backend does not report: a
// lower number would make nothing free as far as is known.
func affordable(budget float64, wanted map[string]int, deployments []deploymentRow, now time.Time) map[string]int {
	demands := make([]demand, 0, len(deployments))
	for _, s := range deployments {
		has := s.atMost(now)
		d := demand{Name: s.Name, Cost: s.Cost, Current: has, Desired: has, Floor: has}
		if n, decided := wanted[s.Name]; decided && s.unknown(now) {
			d.Desired = max(n, has)
		} else if decided {
			d.Desired, d.Floor = n, min(n, s.assured(n, now))
		}
		demands = append(demands, d)
	}
	left := fit(budget, demands)
	for _, s := range deployments {
		if n, decided := wanted[s.Name]; decided {
			left[s.Name] = min(n, left[s.Name])
		} else {
			left[s.Name] = s.Desired
		}
	}
	return left
}

// assured are the instances of n that the budget does not take away: all where the number is an operator's or is not
// applied.
func (s deploymentRow) assured(n int, now time.Time) int {
	least := max(s.policy.Min, floorAt(s.policy.Floors, now))
	switch {
	case s.overridden(now), s.Mode == Manual, !s.Mode.applies():
		return n
	case s.Mode == UpOnly:
		return max(least, s.Desired)
	}
	return least
}

// demand is what a deployment asks of a budget.
type demand struct {
	Name    string
	Cost    float64 // of an instance an hour
	Current int
	Desired int
	Floor   int // instances that the budget does not take away
}

// costMax bounds the cost of an instance an hour, as that of a budget.
const costMax = 1e6

// fit lowers desired numbers until their cost an hour is within the budget. Growth is given up
// first, one instance after another, from the first of the demands that want most beyond their present numbers; then
// instances above the floors. A budget of 0 is none. Floors are kept even where they alone exceed the budget. A demand
// whose cost is none (above costMax, or no number) gets its floor, and is left out of the sum: it would leave none to
// others. It takes time for each demand and not for each instance that is given up.
func fit(budget float64, demands []demand) map[string]int {
	result := make(map[string]int, len(demands))
	for _, d := range demands {
		result[d.Name] = d.Desired
	}
	if budget <= 0 {
		return result
	}
	demands = slices.DeleteFunc(slices.Clone(demands), func(d demand) bool {
		if d.Cost <= costMax {
			return false
		}
		result[d.Name] = min(d.Desired, d.Floor)
		return true
	})
	lower(budget, demands, result, func(d demand) int { return max(d.Current, d.Floor) })
	lower(budget, demands, result, func(d demand) int { return d.Floor })
	return result
}

// lower takes instances above the least numbers of demands until the cost is within the budget. As those that want most
// give up one each in turn, all that want more come down to the same height above their least numbers: it is searched
// for, and only the last round is made one by one.
func lower(budget float64, demands []demand, numbers map[string]int, least func(demand) int) {
	n := make([]int, len(demands))
	at := func(i, height int) int {
		if bottom := least(demands[i]); demands[i].Cost > 0 && n[i] > bottom {
			return min(n[i], bottom+height)
		}
		return n[i]
	}
	cost := func(height int) (sum float64) {
		for i, d := range demands {
			sum += float64(at(i, height)) * d.Cost
		}
		return sum
	}
	highest := 0
	for i, d := range demands {
		n[i] = numbers[d.Name]
		highest = max(highest, n[i]-least(d))
	}
	// The least height whose cost is over the budget; all are lowered to it, and some of them by one more.
	height := sort.Search(highest, func(height int) bool { return cost(height) > budget })
	left := cost(height)
	for i, d := range demands {
		n[i], numbers[d.Name] = at(i, height), at(i, height)
	}
	for i, d := range demands {
		if left <= budget {
			return
		}
		if lowered := at(i, height-1); height > 0 && lowered < n[i] {
			numbers[d.Name] = lowered
			left -= d.Cost
		}
	}
}
