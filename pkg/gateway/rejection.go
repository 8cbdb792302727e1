package gateway

import (
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/httpserver"
)

// Dropped is why a request was not served, in the words of the header x-penstock-dropped-reason.
type Dropped string

// The reasons.
const (
	DropNone        Dropped = ""
	DropFlowFull    Dropped = "flow_queue_full"     // the flow's own bound on waiting requests
	DropOverloaded  Dropped = "overloaded"          // the pool is full, or its wait would be too long
	DropEvicted     Dropped = "evicted"             // it waited, and made room for a request of more weight
	DropTimeout     Dropped = "queue_timeout"       // it waited as long as it may
	DropDeadline    Dropped = "deadline_exceeded"   // the caller's own deadline
	DropNoEndpoints Dropped = "no_endpoints"        // no instance, and none may start
	DropCold        Dropped = "cold_start_timeout"  // no instance came up in time
	DropShutdown    Dropped = "shutting_down"       // this gateway drains
	DropCancelled   Dropped = "client_closed"       // the caller went away
	DropRate        Dropped = "rate_limit_exceeded" // a limit of the token
	DropUpstream    Dropped = "upstream_error"      // the worker broke before a byte
)

// Rejection is the error of a request that was not served.
type Rejection struct {
	Reason     Dropped
	RetryAfter time.Duration // when another attempt makes sense; 0: not known
	Detail     string        // one line for a person

	noRoom bool // it was refused when it arrived, for want of capacity
	paused bool // no call may begin, whether there is room or not
}

// Error implements error.
func (r *Rejection) Error() string {
	if r.Detail == "" {
		return string(r.Reason)
	}
	return fmt.Sprintf("%s: %s", r.Reason, r.Detail)
}

// status returns the HTTP status of a refusal; full is that of a pool without room, by its policy.
func (r *Rejection) status(full int) int {
	switch r.Reason {
	case DropFlowFull, DropOverloaded, DropEvicted, DropTimeout:
		return full
	case DropRate:
		return 429
	case DropDeadline:
		return 504
	case DropUpstream:
		return 502
	case DropCancelled:
		return statusLeft
	default:
		return 503
	}
}

// code is the error code in the answer. An evicted request is told the same as one that found the pool
// full: the difference is in the header.
func (r *Rejection) code() string {
	if r.Reason == DropEvicted {
		return string(DropOverloaded)
	}
	return string(r.Reason)
}

// statusLeft is the status of a request whose client went away.
const statusLeft = httpserver.StatusClientGone
