package tasknode

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

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
