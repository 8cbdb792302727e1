package recovery

import (
	"fmt"
	"slices"
	"time"
)

// Reading is the clocks and nodes as one pass read them.
type Reading struct {
	At time.Time // of this process, monotonic, after the last answer: a slow reading counts as late
	// Unanswered is the longest time since the previous reading without an answer of the database
	// to any statement: a long pass with answers all along is no stall. Zero means the time between
	// the two readings.
	Unanswered time.Duration
	Clock      time.Duration // of the database, from any fixed moment
	Uptime     time.Duration // of the database server
	Nodes      []Node
}

// Suspender decides whether a lapsed lease is evidence that its node died. Its zero value is ready
// to use.
//
// No lock is freed
//
//   - for a third of a lease after the first reading: after a jump of the clock live nodes renew their leases in it;
//   - for a lease after the database gave the leader no answer for more than half a lease: it may have been out of
//     reach for the nodes as well;
//   - for a lease after the database's clock moved differently from the leader's by more than a fifth of a lease;
//   - for a lease after the database server was started;
//   - while more than a share of the nodes (and not just one or two) have been silent for more than half their
//     lease and there is evidence of a common cause: none of the others is heard either, or a reading was more
//     than a fifth of a lease late within the last lease. And for a third of a lease after that, since nodes do not
//     come back all at once. A node that has been silent for two leases is dead for any cause and not counted.
//
// If other nodes are heard and readings are on time, heartbeats get through: the silent nodes died,
// however many they are, and recovery waits no longer than for a single one. If no node is heard,
// no node could run the freed entries, so waiting costs nothing.
//
// Half a lease is more than two heartbeats. So when all nodes fall silent at once this is seen before the first
// lease lapses.
type Suspender struct {
	Share    float64
	NodesMin int

	last      Reading
	lateUntil time.Time // a lease after the last late reading
	until     time.Time
	reason    string
}

// leaseDefault is used as the lease while there are no nodes.
const leaseDefault = 10 * time.Second

// Judge returns why no lock may be freed now, or an empty string. It must be called with every
// reading, in order.
func (s *Suspender) Judge(r Reading) string {
	r.Nodes = slices.DeleteFunc(slices.Clone(r.Nodes), func(n Node) bool { return n.Gateway })
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
		s.suspend(r.At.Add(lease/3), "a new term observes before it frees locks")
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
