package gateway

import (
	"slices"
	"time"
)

// Request is one online call on its way through a pool. The exported fields are the caller's.
type Request struct {
	ID          string
	Flow        string // whose request it is
	Share       string // flow whose share of the pool it takes; empty: Flow
	Criticality Criticality
	Weight      float64       // of the flow; 0 is taken as 1
	Bytes       int           // of the body, which is kept while the request waits
	Held        *heldBytes    // of the holder of the request; nil: none is known
	TTL         time.Duration // longest wait; 0: the pool's
	Deadline    time.Time     // of the caller; zero: none
	TokensIn    float64       // estimated from the body; 0: not known
	TokenMax    float64       // that may be generated; 0: not bounded
	Session     uint64        // hash of the session or cache key; 0: none
	Prefix      []uint64      // hashes of the blocks that the prompt begins with
	Adapter     string        // LoRA adapter; empty: none
	Choices     int           // sequences that it asks for; 0 is taken as 1
	Avoid       []int32       // instances that have refused it
	// Misrouted says that those in Avoid do not have what it asks for, as they answered.
	Misrouted bool
	// Leave is called once when the request is dispatched or dropped, under the pool's lock: it
	// must not block. It is not called for requests that Arrive and Cancel answer themselves.
	Leave func(r *Request, dropped Dropped)

	inPool
}

// inPool is what a pool knows of a request.
type inPool struct {
	flow       *flow
	prev, next *Request
	state      requestState
	estimate   float64
	units      float64 // what the flow is charged for a millisecond of its slot: its sequences, times the GPUs
	expected   float64 // wait at its arrival, without slack, in milliseconds; 0: not estimated
	arrived    time.Time
	expires    time.Time     // by TTL
	left       time.Duration // of TTL when it was dispatched
	limit      time.Time     // the earlier of expires and Deadline
	restarted  bool
	trial      bool        // its instance fails, and was to be tried
	slot       *leasedSlot // nil before it has begun
	instance   *instance
	server     string // name and address of the instance when the slot was granted: a later catalog may change them
	address    string
	began      time.Time
	bucket     int64 // of the service in which it was counted when it began
	trace      Trace
}

type requestState uint8

const (
	stateNew requestState = iota
	stateWaiting
	stateInFlight
	stateEnded
)

func (r *Request) avoids(id int32) bool { return slices.Contains(r.Avoid, id) }

// homeKey is what the request's home is computed from; 0: it has none.
func (r *Request) homeKey() uint64 {
	if r.Session != 0 {
		return r.Session
	}
	if len(r.Prefix) >= prefixMinimum {
		return r.Prefix[prefixMinimum-1]
	}
	return 0
}

// Trace has the decision of the pool about a request, for `penstock gateway explain`.
type Trace struct {
	Bypassed bool      `json:"bypassed"`
	Mode     string    `json:"mode"`
	Arrived  time.Time `json:"arrived_at"`
	Ahead    int       `json:"ahead"`      // waiting requests at its arrival
	Start    float64   `json:"start_tag"`  // of its flow at dispatch
	Virtual  float64   `json:"virtual"`    // virtual time of the criticality then
	Estimate float64   `json:"cost_ms"`    // estimated
	WaitedMS float64   `json:"waited_ms"`  // until dispatch or refusal
	Instance int32     `json:"instance"`   // 0: none
	Score    float64   `json:"score"`      // of the instance at dispatch
	Dropped  Dropped   `json:"dropped"`    // why it was not served
	Floor    bool      `json:"by_floor"`   // its criticality went first because it had got less than its floor
	CostMS   float64   `json:"service_ms"` // actual
}

// CallEnd says how one call ended, for the pool.
type CallEnd struct {
	Took                time.Duration
	TokensIn, TokensOut int64
	First               time.Duration // until the first event of a stream; 0: the answer was none
	Busy                bool          // the worker had no room: nothing ran
	RetryAfter          time.Duration // with Busy: as the worker asked for
	Unused              bool          // no call was made: it says nothing of the instance
	Failed              bool          // it ran, and failed or was broken off
	Fault               bool          // with Failed: the server did by itself, and nothing of an answer was passed on
	Misrouted           bool          // with Failed: it answered that it does not have what was asked for
	Unfit               bool          // with Failed: the instance turned it away, nothing ran, and no answer passed
	Doubt               bool          // it may still run: the slot is not idle
}

// streamed is for how long a stream made its output tokens behind the first one, and how many those are; 0 if that is
// not known.
func (e CallEnd) streamed() (took time.Duration, tokens int) {
	if e.First <= 0 || e.TokensOut < 2 {
		return 0, 0
	}
	return e.Took - e.First, int(e.TokensOut) - 1
}
