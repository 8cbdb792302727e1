// Package peers runs Penstock and other Postgres queues side by side, each through its fastest documented path,
// on one private durable Postgres, and counts what every entry cost.
//
// Each measured step runs in a process of its own (see child.go), so that CPU and memory of one contender
// never mix with another's, whatever language it is written in.
package peers

import (
	"context"
	"errors"
	"strings"
	"time"
)

// ErrUnsupported says that a contender has no public way to do a step, such as River and ordered groups.
var ErrUnsupported = errors.New("not supported by this contender")

// Contender is one queue under measurement. A process calls Setup once, then one other method, then Close.
// Handlers do nothing but count: what is measured is the queue.
type Contender interface {
	// Setup connects to dsn and brings the schema up to date. It is never measured.
	Setup(ctx context.Context, dsn string, payload Payload) error
	// BulkPush pushes n entries in batches of 1000 from 2 connections (see bulk in load.go).
	// With groupSize above 1 entry i belongs to group i % (n/groupSize), so groups are interleaved.
	BulkPush(ctx context.Context, n, groupSize int) (Work, error)
	// SinglePush pushes n entries one call and one transaction each from conns connections.
	// Apart, none goes together with another caller's.
	SinglePush(ctx context.Context, conns, n int, s Settings) (Work, error)
	// DrainSolo works entries until the tally is over, then stops gracefully.
	// The clock stops when every handled entry is durably finished.
	DrainSolo(ctx context.Context, tally *Tally) (Work, error)
	// DrainGroups is DrainSolo for entries pushed with a groupSize: in order and one at a time inside a group.
	DrainGroups(ctx context.Context, tally *Tally) (Work, error)
	// Sustained pushes and works at once for d with a bounded backlog, then finishes what is left.
	Sustained(ctx context.Context, d time.Duration, tally *Tally) (Work, error)
	// PickupLatency pushes n entries, one every 5 to 25 ms, into an idle queue with a waiting worker.
	PickupLatency(ctx context.Context, n int, s Settings) (Work, error)
	// Left counts accepted entries that are not finished yet: the check on the figures.
	Left(ctx context.Context) (int, error)
	Close()
}

// Settings says how a contender is set up for a pick-up or single pushes.
type Settings string

// The settings of a pick-up, and of single pushes.
const (
	Defaults Settings = ""          // what one gets by not choosing
	Tuned    Settings = "tuned"     // for latency, as its documentation advises
	HintsOff Settings = "hints_off" // defaults, without LISTEN and NOTIFY: what polling alone gives
	Apart    Settings = "apart"     // each push in a statement and a transaction that are nobody else's
)

const (
	batchSize = 1000 // entries in one bulk push, for every contender alike
	pushers   = 2    // connections of a bulk push

	// sustainedBacklogMax bounds how far the pusher of Sustained runs ahead of the workers.
	sustainedBacklogMax = 20 * batchSize
)

// Payload is the body of every entry: its number and padding.
type Payload struct{ pad string }

// NewPayload returns a payload of about size bytes as JSON.
func NewPayload(size int) Payload {
	return Payload{pad: strings.Repeat("x", max(0, size-len(`{"n":10000,"pad":""}`)))}
}

// Work is what one step did, as the contender's own process reports it.
type Work struct {
	Entries int     `json:"entries"`
	Seconds float64 `json:"seconds"`

	// The latencies are in microseconds.
	// LatencyMicros has one value a call: the push call in SinglePush;
	// in PickupLatency the time from the push's return (or 0 if the handler was faster) to the handler's start.
	LatencyMicros []int `json:"latency_us,omitempty"`
	// FromPushMicros is, in PickupLatency, the time from the start of the push call to the handler's start.
	FromPushMicros []int `json:"from_push_us,omitempty"`
}
