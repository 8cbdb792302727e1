package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"syscall"
	"time"
)

// Adapter speaks one worker protocol to one instance. All methods are safe for
// concurrent use. Problems of the worker or the network are outcomes, never
// errors, so that each is classified where the protocol is known.
type Adapter interface {
	// Submit sends the call and waits for the worker's answer. Ending ctx closes
	// the connection; the outcome is then Cancelled where the protocol is known
	// to stop a run whose connection closes, and Unknown elsewhere.
	Submit(ctx context.Context, call Call) Outcome

	// Poll asks how an accepted run is doing. Accepted means that it still runs,
	// Busy and NotReady mean that the worker could not be asked just now.
	Poll(ctx context.Context, run RunRef) Outcome

	// Cancel asks the worker to stop an accepted run.
	Cancel(ctx context.Context, run RunRef) Cancellation

	// Probe asks for the instance's health and load.
	Probe(ctx context.Context) Health
}

// RunRef names one run of an entry on a worker. It is all that another node needs
// to re-attach to a run whose first node died.
type RunRef struct {
	Entry   string // entry id
	Token   int64  // fencing token of the entry's lock; with Entry the Idempotency-Key, see attemptID
	Attempt int    // 1 for the first
	Remote  string // the worker's name for the run; empty until it accepted

	// Request is the entry's payload: parts of it that a worker's error repeats tell nothing about
	// the worker.
	Request json.RawMessage
}

// Call is one entry on its way to a worker.
type Call struct {
	RunRef
	FinishBy    time.Time       // on this process's monotonic clock; zero: no deadline
	Payload     json.RawMessage // the entry's payload
	TraceParent string          // W3C trace context, passed on
	Callback    string          // where an asynchronous worker reports; unguessable, one per lock
	Operation   string          // OpenAI only: overrides the model's operation
	Output      Sink            // receives streamed output; nil drops it
}

// Health is the result of a probe. Figures that the worker does not report are nil.
type Health struct {
	State    HealthState
	Active   *int     // calls the worker is running
	Capacity *int     // calls it can run at once
	Queued   *int     // calls waiting inside the worker
	KVUsage  *float64 // share of its key-value cache in use, 0 to 1
	Reason   string   // for a person, when the state is not ready or busy

	// Unreached: nothing answered, neither the server nor its host: what the server runs it may run still.
	Unreached bool
	// Gone: the host refuses the connection, so that there is no server, which would run something.
	Gone bool
}

// Idle reports whether the worker is known to run nothing. A worker that reports no count is known
// to be idle only when it has a single slot, since it is ready as long as one slot is free.
func (h Health) Idle(slots int) bool {
	if h.Active != nil {
		return *h.Active == 0
	}
	return slots == 1
}

// probeFailed is the health of an instance whose probe got no answer. A host that refuses or resets the connection has
// no server, or one that gives up; behind a timeout or a network without a route the server may be at work. Only a
// refused connection shows that there is no server.
func probeFailed(err error) Health {
	closed := errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF)
	return Health{
		State: StateUnhealthy, Reason: Clip(err.Error()), Unreached: !closed,
		Gone: errors.Is(err, syscall.ECONNREFUSED),
	}
}

// HealthState of an instance as its worker reports it.
type HealthState string

// The states of an instance. Unhealthy may pass; defunct needs a restart.
const (
	StateStarting  HealthState = "starting"
	StateReady     HealthState = "ready"
	StateBusy      HealthState = "busy"
	StateUnhealthy HealthState = "unhealthy"
	StateDefunct   HealthState = "defunct"
)

// Serving reports whether calls may be sent to an instance in this state.
func (s HealthState) Serving() bool { return s == StateReady || s == StateBusy }

// Cancellation is how far a cancel got.
type Cancellation struct {
	Delivered bool   // the worker took the request to stop
	Confirmed bool   // the worker said that the run has stopped
	NoAnswer  bool   // the request had no answer: the instance may be away
	Reason    string // for a person, when not confirmed
}

// Instance is one endpoint of a model.
type Instance struct {
	Endpoint string // base URL; for the generic protocol the URL that takes the POST
	Slots    int    // calls at once; 0 is taken as 1
}

// New returns the adapter that speaks the model's protocol to the instance. It
// fails, naming the field, when the model or the endpoint is not usable.
func New(model Model, instance Instance, config Config) (Adapter, error) {
	model = model.WithDefaults()
	if err := model.Validate(); err != nil {
		return nil, fmt.Errorf("check model %q: %w", model.Name, err)
	}
	base, err := parseEndpoint(instance.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("check endpoint of model %q: %w", model.Name, err)
	}
	w := newWire(model, base, config.withDefaults())
	switch model.Protocol {
	case ProtocolGeneric:
		return &generic{wire: w}, nil
	case ProtocolCog:
		return &cog{wire: w, slots: max(instance.Slots, 1)}, nil
	case ProtocolOIP:
		return &oip{wire: w}, nil
	default: // Validate admits no fifth
		return &openAI{wire: w}, nil
	}
}

// CheckEndpoint returns a *FieldError where raw cannot be the base URL of an instance.
func CheckEndpoint(raw string) error {
	_, err := parseEndpoint(raw)
	return err
}

func parseEndpoint(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return nil, fieldError("endpoint", "is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fieldError("endpoint", "must begin with http:// or https://")
	case u.Host == "":
		return nil, fieldError("endpoint", "names no host")
	case checkHost(u.Hostname()) != nil:
		return nil, fieldError("endpoint", "is link-local, or the metadata service of a cloud: no worker is there")
	case u.User != nil:
		return nil, fieldError("endpoint", "must not carry a user or password: put a secret reference into headers")
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fieldError("endpoint", "must not carry a query or fragment")
	}
	return u, nil
}
