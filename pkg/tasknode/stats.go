package tasknode

import (
	"maps"
	"sync/atomic"
	"time"
)

// Stats has the counters of the node since its start. All fields may be read at any time.
type Stats struct {
	Claims     atomic.Int64 // claims, empty ones too
	Claimed    atomic.Int64 // locks
	ClaimTime  atomic.Int64 // nanoseconds in claims
	Runs       atomic.Int64 // calls of handlers, for one entry or several
	RunErrors  atomic.Int64 // those in which an entry ended in an error
	Settles    atomic.Int64 // transactions
	Settled    atomic.Int64 // endings recorded
	Refused    atomic.Int64 // endings refused, because the lock was lost
	Repeated   atomic.Int64 // of Settled: an earlier try had recorded them, and its answer was lost
	Unrecorded atomic.Int64 // endings that could not be recorded and were left to recovery
	SettleTime atomic.Int64 // nanoseconds in settles
	LeasesLost atomic.Int64 // how often the node's lease ran out
}

// Stats returns the node's counters.
func (n *Node) Stats() *Stats { return &n.stats }

// Threads is how many processing threads the node has now.
func (n *Node) Threads() int { return int(n.threads.Load()) }

// Held is how many locks the node holds.
func (n *Node) Held() int { return n.permits.held() }

func (s *Stats) claimed(locks int, took time.Duration) {
	s.Claims.Add(1)
	s.Claimed.Add(int64(locks))
	s.ClaimTime.Add(int64(took))
}

func (s *Stats) ran(err error) {
	s.Runs.Add(1)
	if err != nil {
		s.RunErrors.Add(1)
	}
}

func (s *Stats) settled(endings, refused, repeated int, took time.Duration) {
	s.Settles.Add(1)
	s.Settled.Add(int64(endings - refused))
	s.Refused.Add(int64(refused))
	s.Repeated.Add(int64(repeated))
	s.SettleTime.Add(int64(took))
}

// load is what the node reports of itself with each heartbeat, for people to read.
func (n *Node) load() map[string]any {
	load := map[string]any{"locks": n.Held(), "threads": n.Threads(), "waiting": n.waiting.len()}
	if reasons := n.handedBack.report(time.Now()); len(reasons) > 0 {
		load["handed_back"] = reasons
	}
	if n.cfg.Status != nil {
		maps.Copy(load, n.cfg.Status())
	}
	return load
}
