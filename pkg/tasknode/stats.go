package tasknode

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
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

// handedBack has for each queue why a handler handed an entry of it back last, as it does where no worker takes the
// call, until a handler ends an entry of the queue. Neither the entry nor its lane keeps that, and
// penstock.explain_entry reads it in the heartbeats.
type handedBack struct {
	mu   sync.Mutex
	last map[string]handBack
}

type handBack struct {
	at, until time.Time // until: it is reported
	entry     invalidation.EntryID
	reason    string
}

const (
	handBackKept   = time.Minute // a reason is reported, from when on the entry may be claimed again
	handBackQueues = 50          // with a reason that is kept: the newest
	handBackBytes  = 300         // of a reason
	handBacksBytes = 4096        // of all reasons in one heartbeat, as JSON: the newest
)

func (h *handedBack) add(queue string, e *invalidation.Ending, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch e.Verb() {
	case "done", "retry", "fail":
		delete(h.last, queue) // a worker took the call
		return
	}
	reason, delay := e.HandedBack()
	if reason == "" {
		return
	}
	if len(reason) > handBackBytes {
		reason = strings.ToValidUTF8(reason[:handBackBytes], "") + "..."
	}
	if h.last == nil {
		h.last = map[string]handBack{}
	}
	h.last[queue] = handBack{at: now, until: now.Add(delay + handBackKept), entry: e.Entry, reason: reason}
	if len(h.last) > handBackQueues {
		delete(h.last, h.newestFirst()[handBackQueues])
	}
}

// newestFirst returns the queues that have a reason.
func (h *handedBack) newestFirst() []string {
	return slices.SortedFunc(maps.Keys(h.last), func(a, b string) int { return h.last[b].at.Compare(h.last[a].at) })
}

// report returns reasons by queue, each with its entry and its age in seconds.
func (h *handedBack) report(now time.Time) map[string]json.RawMessage {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.last, func(_ string, b handBack) bool { return now.After(b.until) })
	reasons := make(map[string]json.RawMessage, len(h.last))
	size := len(`{}`)
	for _, queue := range h.newestFirst() {
		b := h.last[queue]
		text, err := json.Marshal(map[string]any{
			"entry": b.entry, "reason": b.reason, "seconds": math.Round(now.Sub(b.at).Seconds()*10) / 10,
		})
		if size += len(queue) + len(`"":,`) + len(text); err != nil || size > handBacksBytes {
			break
		}
		reasons[queue] = text
	}
	return reasons
}
