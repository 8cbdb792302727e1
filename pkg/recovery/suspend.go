package recovery

import (
	"fmt"
	"time"
)

// Reading is what one pass read of the clocks and the nodes.
type Reading struct {
	At time.Time // of this process, monotonic, from when all was answered: a reading that took long came late
	// Unanswered is the longest time since the reading before without an answer of the database, to whatever statement:
	// a pass that works long and is answered all the while is no stall. Zero stands for the time between the two readings.
	Unanswered time.Duration
	Clock      time.Duration // of the database, from any fixed moment
	Uptime     time.Duration // of the database server
	Nodes      []Node
}

// Suspender judges whether a lapsed lease says anything about its node. Its zero value has seen nothing yet.
//
// Nothing is freed
//
//   - for a third of a lease after the first look: if the clock had jumped, that is when live nodes would show it;
//   - for a lease after the database gave us no answer for more than half a lease: it was out of reach for us, so
//     perhaps for the nodes;
//   - for a lease after the database's clock moved otherwise than ours by more than a fifth of a lease;
//   - for a lease after the database server was started;
//   - while more than a share of the nodes (and not just one or two) have been silent for more than half their
//     lease and something says that it was not they: none of the others is heard either, or a look of ours was more
//     than a fifth of a lease late within the last lease. And for a third of a lease after that, for they do not come
//     back in the same moment. A node that has been silent for two leases is not counted any more: it is dead,
//     whatever happened.
//
// Where others are heard all the while, and our looks come on time, heartbeats get through: those who are silent died,
// however many they are, and wait no longer than one that died alone. Where none is heard, nobody is there to run what
// they held, so that waiting costs nothing.
//
// Half a lease is more than two heartbeats. So when all nodes fall silent at once this is seen before the first
// lease lapses.
type Suspender struct {
	Share    float64
	NodesMin int

	last      Reading
	lateUntil time.Time // a lease after the last look that came late
	until     time.Time
	reason    string
}

// leaseDefault stands for the nodes' lease where there are no nodes.
const leaseDefault = 10 * time.Second

// Judge returns why nothing may be freed now, or an empty string. It must see every look, in order.
func (s *Suspender) Judge(r Reading) string {
	lease := longestLease(r.Nodes)
	first := s.last.At.IsZero()
	between := r.At.Sub(s.last.At)
	jump := (r.Clock - s.last.Clock) - between
	gap := between
	if r.Unanswered > 0 {
		gap = min(between, r.Unanswered)
	}
	s.last = Reading{At: r.At, Clock: r.Clock}
	if !first && gap > lease/5 {
		s.lateUntil = r.At.Add(lease)
	}
	switch {
	case first:
		s.suspend(r.At.Add(lease/3), "a new term looks before it acts")
	case gap > lease/2:
		s.suspend(r.At.Add(lease), fmt.Sprintf("the database was out of reach for %v", gap.Round(time.Millisecond)))
	case jump.Abs() > lease/5:
		s.suspend(r.At.Add(lease), fmt.Sprintf("the database's clock jumped by %v", jump.Round(time.Millisecond)))
	}
	if r.Uptime < lease {
		s.suspend(r.At.Add(lease-r.Uptime), "the database was restarted")
	}
	if reason := s.silence(r); reason != "" {
		s.suspend(r.At.Add(lease/3), reason)
	}
	if r.At.Before(s.until) {
		return s.reason
	}
	return ""
}

// suspend prolongs, it never shortens.
func (s *Suspender) suspend(until time.Time, reason string) {
	if until.After(s.until) {
		s.until, s.reason = until, reason
	}
}

func (s *Suspender) silence(r Reading) string {
	silent, counted := 0, 0
	for _, n := range r.Nodes {
		if n.Silent > 2*n.Lease {
			continue
		}
		counted++
		if n.Silent > n.Lease/2 {
			silent++
		}
	}
	doubt := silent == counted || r.At.Before(s.lateUntil)
	if doubt && silent >= s.NodesMin && float64(silent) > s.Share*float64(counted) {
		return fmt.Sprintf("%d of %d nodes fell silent together", silent, counted)
	}
	return ""
}

func longestLease(nodes []Node) time.Duration {
	var longest time.Duration
	for _, n := range nodes {
		longest = max(longest, n.Lease)
	}
	if longest == 0 {
		return leaseDefault
	}
	return longest
}
