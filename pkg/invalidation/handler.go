package invalidation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// Run is one run of an entry on a node.
type Run struct {
	Queue *Queue
	Entry Entry
	Lock  *Lock
	Node  NodeID
	// Began is when the run began, on this process's monotonic clock; zero where it is one of several entries that run
	// together.
	Began time.Time
	// Lasting is for what goes on after a cancel, so that no other entry of the lock key starts beside it. It ends when
	// nothing of the run may go on: with ErrDraining or ErrLeaseLost, and once Handle has returned. Without a lock key
	// it ends with the cancel. nil: with none of them.
	Lasting context.Context

	measured measured
	sent     int    // the last piece of output that AppendOutput has sent
	merged   []*Run // those whose payloads it handles as one, its own too, oldest first; nil: its own alone
}

// Note keeps measurements of the handler, a JSON object, beside the outcome of the entry: with the
// result, or with the error in the history. The last note counts; one that CheckJSON refuses, or of
// more than 64 KiB, is left out. Call it from the goroutine that Handle was called in.
func (r *Run) Note(meta json.RawMessage) {
	if len(meta) > noteBytesMax || CheckJSON(meta) != nil {
		return
	}
	if r.Lock.notes == nil {
		r.Lock.notes = map[EntryID]json.RawMessage{}
	}
	r.Lock.notes[r.Entry.ID] = meta
}

// Handler does the work of a queue's entries.
type Handler interface {
	// Handle runs one entry. Its context ends at the entry's deadline, when the entry is cancelled,
	// when the node lost its lease or shuts down; context.Cause says which. The result, nil for
	// none, must be JSON. The error decides the ending: see RetryIn, Permanent, Snooze, NoCapacity
	// and WithClass. Where it wraps several of them, the outer one decides about class and delay.
	Handle(ctx context.Context, r *Run) (json.RawMessage, error)
}

// BatchHandler is a Handler that takes all entries of a lock at once, oldest first. It answers for each of them. A
// cancel ends the context once the cancellation of each of them is requested, and a deadline once that of each of them
// has passed: else the run goes on for the others.
type BatchHandler interface {
	HandleBatch(ctx context.Context, runs []*Run) []BatchAnswer
}

// BatchAnswer is the result of one entry of a batch.
type BatchAnswer struct {
	Result json.RawMessage
	Err    error
}

// HandlerFunc is a function as a Handler.
type HandlerFunc func(ctx context.Context, r *Run) (json.RawMessage, error)

// Handle calls the function.
func (f HandlerFunc) Handle(ctx context.Context, r *Run) (json.RawMessage, error) { return f(ctx, r) }

// Causes with which a run's context ends. Handle may return them or any error that wraps them.
var (
	// ErrCancelled is the cause if the entry's cancel was requested.
	ErrCancelled = errors.New("entry cancelled")
	// ErrLeaseLost is the cause if the node could not renew its lease: other nodes may run its
	// entries.
	ErrLeaseLost = errors.New("node lost its lease")
	// ErrDraining is the cause if the node shuts down and its grace period is over.
	ErrDraining = errors.New("node is draining")
	// ErrFinishBy is the cause if the entry's finish_by has passed.
	ErrFinishBy = errors.New("finish_by has passed")
	// ErrRunTimeout is the cause if the run took longer than the queue's run_timeout.
	ErrRunTimeout = errors.New("run took longer than run_timeout")
)

// answer is an error of a handler that decides how the entry ends.
type answer struct {
	err          error
	class        string
	delay        time.Duration
	hasDelay     bool
	postpone     bool // of delay: the entry waits for so long, and not its key
	permanent    bool
	unrepeatable bool // permanent even if the lease was lost or the node drains
	release      bool // spends no attempt
	interrupted  bool // of release: after the run had begun its work
	throttle     throttleOrder
}

func (a *answer) Error() string {
	if a.err == nil {
		return "the handler gave no reason"
	}
	return a.err.Error()
}

func (a *answer) Unwrap() error { return a.err }

// RetryIn asks that the entry be tried again after d, whatever the policy's backoff says; its attempts still count.
func RetryIn(d time.Duration, err error) error { return &answer{err: err, delay: d, hasDelay: true} }

// Permanent marks an error that a retry would not mend: the entry becomes a failure. Where the node lost its lease or
// drains, which may be the reason for the error, it is released all the same.
func Permanent(err error) error { return &answer{err: err, permanent: true} }

// Unrepeatable is Permanent also where the node lost its lease or drains: the entry may have run, and must not run
// twice.
func Unrepeatable(err error) error { return &answer{err: err, permanent: true, unrepeatable: true} }

// WithClass gives an error a class, for which the queue's retry policy may have rules of its own. It returns nil for
// nil.
func WithClass(class string, err error) error {
	if err == nil {
		return nil
	}
	return &answer{err: err, class: class}
}

// Snooze hands the entry back for d, a millisecond at least, and spends no attempt: it is not time for it yet. It comes
// back behind the entries that are ready then, and later entries of its key may run before it.
func Snooze(d time.Duration) error {
	d = max(d, time.Millisecond)
	return &answer{err: fmt.Errorf("snoozed for %s", d), delay: d, hasDelay: true, postpone: true, release: true}
}

// NoCapacity hands the entry back for d, 0 for at once and a day at most, and spends no attempt: the worker is busy or
// not ready. The entry keeps its position, and no later entry of its key starts before it.
func NoCapacity(d time.Duration, err error) error {
	return &answer{err: err, delay: d, hasDelay: true, release: true}
}

// ThrottleQueue releases the entry without spending an attempt, and throttles the queue for d: no
// node claims from it. It is for a downstream that answered 429 with Retry-After. d is a second at
// least and a day at most: what is beyond is taken as that.
func ThrottleQueue(d time.Duration, err error) error {
	return &answer{err: err, release: true, throttle: throttleOrder{wait: max(d, throttleMin)}}
}

// throttleMin keeps an order for no time from being none: the entry would run again at once.
const throttleMin = time.Second

// ThrottleFlow is ThrottleQueue for the flow of the entry alone.
func ThrottleFlow(d time.Duration, err error) error {
	return &answer{err: err, release: true, throttle: throttleOrder{wait: max(d, throttleMin), flow: true}}
}

// Judge turns the result and error of a handler into an ending. random is a number in [0, 1) for
// the jitter of a retry.
func Judge(r *Run, result json.RawMessage, err error, ran time.Duration, random float64) Ending {
	l, id := r.Lock, r.Entry.ID
	if err == nil {
		if err := checkResult(result); err != nil {
			return Fail(l, id, Failure{Class: "result", Error: err.Error()}, ran)
		}
		return Done(l, id, result, ran)
	}
	var a answer
	a.collect(err)
	notBegun := errors.Is(err, postgres.ErrNotBegun)
	switch {
	case errors.Is(err, ErrCancelled):
		e := Cancel(l, id, err.Error())
		e.started = r.worked(!notBegun)
		return e
	case errors.Is(err, ErrFinishBy):
		e := Expire(l, id, err.Error())
		e.started = r.worked(!notBegun)
		return e
	case errors.Is(err, ErrConflict), !a.unrepeatable && (errors.Is(err, ErrLeaseLost) || errors.Is(err, ErrDraining)):
		e := Release(l, id, 0)
		e.started = r.worked(!notBegun)
		return e
	}
	if notBegun && !errors.Is(err, ErrRunTimeout) {
		a.release, a.throttle = true, throttleOrder{wait: time.Second} // no error of the handler: the database is away
	}
	if a.release {
		e := Release(l, id, a.delay)
		e.started = r.worked(a.interrupted && !notBegun)
		if a.postpone {
			e = Postpone(l, id, a.delay)
		}
		e.throttle, e.reason = a.throttle, err.Error()
		return e
	}
	switch {
	case postgres.Code(err) == tooDeep: // to try again is of no use
		a.class, a.permanent = "loop", true
	case a.class == "" && errors.Is(err, ErrRunTimeout):
		a.class = "timeout"
	}
	f := Failure{Class: a.class, Error: err.Error()}
	var p *PanicError
	if errors.As(err, &p) {
		f.Class, f.Stack = "panic", p.Stack
	}
	wait, again := r.Queue.Config.retryPolicy().Next(f.Class, r.Entry.Attempt+1, random)
	if a.permanent || !again {
		return Fail(l, id, f, ran)
	}
	if a.hasDelay {
		wait = a.delay
	}
	return Retry(l, id, f, wait, ran)
}

// checkResult refuses a result that could not be recorded, or not be read again.
func checkResult(result json.RawMessage) error {
	if result == nil {
		return nil
	}
	if err := CheckJSON(result); err != nil {
		return fmt.Errorf("handler returned a result that cannot be recorded: %w", err)
	}
	return nil
}

// tooDeep is the SQLSTATE of a push, a callback's too, that is one deeper than may be: a loop.
const tooDeep = "PS011"

// collect joins the answers in the chain of wrapped errors, outer ones first: of two classes, delays or throttles the
// outer one holds.
func (a *answer) collect(err error) {
	switch e := err.(type) { //nolint:errorlint // walks the chain itself
	case nil:
	case *answer:
		a.merge(e)
		a.collect(e.err)
	case interface{ Unwrap() error }:
		a.collect(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			a.collect(one)
		}
	}
}

func (a *answer) merge(b *answer) {
	if !a.hasDelay {
		a.delay, a.hasDelay, a.postpone = b.delay, b.hasDelay, b.postpone
	}
	a.class, a.throttle = cmp.Or(a.class, b.class), cmp.Or(a.throttle, b.throttle)
	a.permanent = a.permanent || b.permanent
	a.unrepeatable = a.unrepeatable || b.unrepeatable
	a.release = a.release || b.release
	a.interrupted = a.interrupted || b.interrupted
}

// PanicError is a panic of a handler.
type PanicError struct {
	Value any
	Stack string
}

func (p *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v", p.Value) }
