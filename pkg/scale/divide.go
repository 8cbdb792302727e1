package scale

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// portion is one deployment of a model (own machines, spot machines, external capacity) with the bounds of its part of
// the model's number.
type portion struct {
	Name     string
	Order    int     // filled first, before cost is compared
	Cost     float64 // of an instance an hour
	Min, Max int
	Mode     Mode
	Current  int
	Ready    int  // instances that take requests
	Yields   bool // its instances must go first: one that is filled before it found no room in the same backend
	Blocked  bool // starts fail, or there is no room for them: no more than Kept, and Tries
	Kept     int  // instances of a blocked deployment that are ready, were ready, or are about to be
	Tries    int  // starts by which a blocked deployment finds out whether they succeed again
	Absent   int  // instances of Current that neither serve nor are about to: they do not count towards n
}

// divide divides n instances of a model among its deployments: filled in order and by cost, given up from
// the dearest. A deployment that may not change keeps its number, which counts towards n but for those that are
// Absent. One that is blocked keeps the instances that it has, and the next one is asked for the rest. Its tries come
// in addition to n: until one of them is ready, no other deployment gives up an instance for them.
func divide(n int, parts []portion) map[string]int {
	ordered := inOrder(parts)
	result := make(map[string]int, len(parts))
	for _, p := range ordered {
		result[p.Name] = p.least()
		n -= p.least() - p.Absent
	}
	for _, p := range ordered {
		more := min(max(n, 0), p.most()-result[p.Name])
		result[p.Name] += max(more, 0)
		n -= max(more, 0)
		if p.mayTry() {
			result[p.Name] += max(0, min(p.Tries, n, p.Max-result[p.Name]))
		}
	}
	return result
}

// inOrder are the parts in the order in which they are filled.
func inOrder(parts []portion) []portion {
	ordered := slices.Clone(parts)
	slices.SortStableFunc(ordered, func(a, b portion) int {
		return cmp.Or(cmp.Compare(a.Order, b.Order), cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Name, b.Name))
	})
	return ordered
}

// keepServing adds to the numbers of divide the ready instances that are given up for those of a deployment that is
// filled before theirs, as long as these are not ready: n ready instances of a model stay n. It returns how many each
// deployment keeps so. None is kept beyond the number that the deployment has now.
func keepServing(n int, parts []portion, numbers map[string]int) (kept map[string]int) {
	ordered := inOrder(parts)
	left := n // ready instances that are wanted beside those that stay in any case
	for _, p := range ordered {
		left -= min(p.Ready, p.least())
	}
	kept = map[string]int{}
	for _, p := range ordered {
		firm := min(p.Ready, p.least())
		serving := min(p.Ready, p.Current, p.most(), firm+max(left, 0))
		if more := serving - numbers[p.Name]; more > 0 && !p.Yields {
			kept[p.Name] = more
			numbers[p.Name] += more
		}
		left -= max(0, min(p.Ready, numbers[p.Name])-firm)
	}
	return kept
}

func (p portion) least() int {
	switch p.Mode {
	case Disabled, Manual:
		return p.Current
	case UpOnly:
		return min(max(p.Current, p.Min), p.most())
	}
	return min(p.Min, p.most())
}

func (p portion) mayTry() bool { return p.Blocked && p.Mode != Disabled && p.Mode != Manual }

func (p portion) most() int {
	if p.Mode == Disabled || p.Mode == Manual {
		return p.Current
	}
	most := max(p.Max, 0)
	if p.Mode == UpOnly {
		most = max(most, p.Current)
	}
	if p.Blocked {
		most = min(most, p.Kept)
	}
	return most
}

// shares divide the number of a model among its deployments. Instances that nothing of ours started count as a part of
// it wherever the leader drives a backend. A deployment whose backend does not report keeps its number, and the others
// make up for those of its instances that are absent. kept is how many of each are in its number only until others are
// ready.
func shares(n, unmanaged int, deployments []deploymentRow, now time.Time) (numbers, kept map[string]int) {
	if len(deployments) == 1 && !deployments[0].managed() {
		return map[string]int{deployments[0].Name: n}, nil
	}
	parts := make([]portion, 0, len(deployments))
	for i, s := range deployments {
		p := s.policy.WithDefaults()
		part := portion{
			Name: s.Name, Order: s.FillOrder, Cost: s.Cost, Mode: p.Mode,
			Min: s.capped(max(p.Min, floorAt(p.Floors, now))), Max: s.capped(p.Max),
			Current: s.Desired, Ready: s.Ready, Yields: s.yields(deployments[:i]),
		}
		switch {
		case len(deployments) == 1: // its mode and override are in n already
			part.Mode = Full
			part.Max = max(part.Max, n)
			part.Min = 0
		case s.overridden(now):
			part.Mode, part.Current = Manual, s.capped(*s.Override)
		case s.unknown(now):
			part.Mode, part.Current = Manual, s.capped(s.Desired)
		case part.Mode == Advise:
			part.Mode = Disabled
		}
		if len(deployments) > 1 && s.unknown(now) {
			part.Absent = max(0, part.Current-s.present(now))
		}
		parts = append(parts, s.limited(part, now))
	}
	numbers = divide(n-unmanaged, parts)
	return numbers, keepServing(n-unmanaged, parts, numbers)
}

// yields says whether the last order of a deployment that is filled before this one found no room in the same backend.
func (s deploymentRow) yields(before []deploymentRow) bool {
	return slices.ContainsFunc(before, func(other deploymentRow) bool {
		return other.Backend == s.Backend && strings.Contains(other.Error, ErrNoRoom.Error())
	})
}

// limited is the part of a deployment whose starts fail, are stuck, or have no room. One whose starts fail or are stuck
// has one try at a time, which is no part of those that it keeps until it is ready. One without room has one more each
// time that there was some.
func (s deploymentRow) limited(part portion, now time.Time) portion {
	part.Blocked = s.failing() || s.stuck.Blocked || s.noRoom(now)
	if !part.Blocked {
		return part
	}
	if !s.reported() {
		part.Kept = s.Desired
		return part
	}
	part.Kept = s.Registered - len(s.Starts)
	for _, began := range s.underWay() {
		switch {
		case now.Sub(began) > stuckAfterOf(s.policy.WithDefaults(), s.coldStartP95):
		case s.isTry(began):
			part.Tries++
		default:
			part.Kept++
		}
	}
	if part.Tries == 0 && !s.backsOff(now) && !now.Before(s.stuck.BlockedUntil) {
		part.Tries = 1
	}
	return part
}

// isTry says whether a start is one by which a deployment finds out whether starts succeed again.
func (s deploymentRow) isTry(began time.Time) bool {
	afterFailure := s.failing() && s.FailedAt != nil && began.After(*s.FailedAt)
	return afterFailure || s.stuck.Blocked && began.After(s.stuck.BlockedUntil)
}
