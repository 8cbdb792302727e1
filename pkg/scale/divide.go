package scale

import (
	"cmp"
	"slices"
	"time"
)

// part is one deployment of a model (own machines, spot machines, external capacity) with the bounds of its part of
// the model's number.
type part struct {
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
func divide(n int, parts []part) map[string]int {
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
func inOrder(parts []part) []part {
	ordered := slices.Clone(parts)
	slices.SortStableFunc(ordered, func(a, b part) int {
		return cmp.Or(cmp.Compare(a.Order, b.Order), cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Name, b.Name))
	})
	return ordered
}

// keepServing adds to the numbers of divide the ready instances that are given up for those of a deployment that is
// filled before theirs, as long as these are not ready: n ready instances of a model stay n. It returns how many each
// deployment keeps so. None is kept beyond the number that the deployment has now.
func keepServing(n int, parts []part, numbers map[string]int) (kept map[string]int) {
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

func (p part) least() int {
	switch p.Mode {
	case Disabled, Manual:
		return p.Current
	case UpOnly:
		return min(max(p.Current, p.Min), p.most())
	}
	return min(p.Min, p.most())
}

func (p part) mayTry() bool { return p.Blocked && p.Mode != Disabled && p.Mode != Manual }

func (p part) most() int {
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

// modelStarts is what is known of the starts of a model where its number is divided.
type modelStarts struct {
	coldP95 float64                 // of cold starts, in seconds
	stuck   map[string]StuckHistory // by deployment; none for the only one: its number has the limit already
}

// shares divide the number of a model among its deployments. Instances that nothing of ours started count as a part of
// it wherever the leader drives a backend. A deployment whose backend does not report keeps its number, and the others
// make up for those of its instances that are absent. kept is how many of each are in its number only until others are
// ready.
func shares(
	n, unmanaged int, deployments []deploymentRow, starts modelStarts, now time.Time,
) (numbers, kept map[string]int) {
	if len(deployments) == 1 && !deployments[0].managed() {
		return map[string]int{deployments[0].Name: n}, nil
	}
	parts := make([]part, 0, len(deployments))
	for i, s := range deployments {
		policy := s.policy.WithDefaults()
		p := part{
			Name: s.Name, Order: s.FillOrder, Cost: s.Cost, Mode: policy.Mode,
			Min: s.capped(max(policy.Min, floorAt(policy.Floors, now))), Max: s.capped(policy.Max),
			Current: s.Desired, Ready: s.Ready, Yields: s.yields(deployments[:i]),
		}
		switch {
		case len(deployments) == 1: // its mode and override are in n already
			p.Mode = Full
			p.Max = max(p.Max, n)
			p.Min = 0
		case s.overridden(now):
			p.Mode, p.Current = Manual, s.capped(*s.Override)
		case s.unknown(now):
			p.Mode, p.Current = Manual, s.capped(s.Desired)
		case p.Mode == Advise:
			p.Mode = Disabled
		}
		if len(deployments) > 1 && s.unknown(now) {
			p.Absent = max(0, p.Current-s.present(now, starts.coldP95))
		}
		parts = append(parts, s.limited(p, starts, now))
	}
	numbers = divide(n-unmanaged, parts)
	return numbers, keepServing(n-unmanaged, parts, numbers)
}

// yields says whether the last order of a deployment that is filled before this one found no room in the same backend.
func (s deploymentRow) yields(before []deploymentRow) bool {
	return slices.ContainsFunc(before, func(other deploymentRow) bool {
		return other.Backend == s.Backend && other.ErrorKind == noRoomError
	})
}

// limited is the part of a deployment whose starts fail, are stuck, or have no room. One whose starts fail or are stuck
// has one try at a time, which is no part of those that it keeps until it is ready. One without room has one more each
// time that there was some.
func (s deploymentRow) limited(p part, starts modelStarts, now time.Time) part {
	stuck := starts.stuck[s.Name]
	p.Blocked = s.failing() || stuck.Blocked || s.noRoom(now)
	if !p.Blocked {
		return p
	}
	if !s.reported() {
		p.Kept = s.Desired
		return p
	}
	p.Kept = s.Registered - len(s.NotReady)
	for _, began := range s.underWay() {
		switch {
		case now.Sub(began) > s.stuckAfter(starts.coldP95):
		case s.isTry(began, stuck):
			p.Tries++
		default:
			p.Kept++
		}
	}
	if p.Tries == 0 && !s.backsOff(now) && !now.Before(stuck.BlockedUntil) {
		p.Tries = 1
	}
	return p
}

// isTry says whether a start is one by which a deployment finds out whether starts succeed again.
func (s deploymentRow) isTry(began time.Time, stuck StuckHistory) bool {
	afterFailure := s.failing() && s.FailedAt != nil && began.After(*s.FailedAt)
	return afterFailure || stuck.Blocked && began.After(stuck.BlockedUntil)
}
