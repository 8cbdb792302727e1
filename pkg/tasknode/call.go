package tasknode

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/penstock/penstock/pkg/invalidation"
)

// call gives the entries of a run to the handler, and returns its answer for each; that to a single one is put into
// room. A panic is the error of all of them.
func (n *Node) call(
	ctx context.Context, h invalidation.Handler, runs []*invalidation.Run, room []invalidation.BatchAnswer,
) (answers []invalidation.BatchAnswer) {
	defer func() {
		if v := recover(); v != nil {
			answers = failed(runs, n.panicked(v, runs[0]))
		}
	}()
	batch, ok := h.(invalidation.BatchHandler)
	if !ok {
		result, err := h.Handle(ctx, runs[0])
		return append(room, invalidation.BatchAnswer{Result: result, Err: n.readable(err, runs[0])})
	}
	answers = batch.HandleBatch(ctx, runs)
	if len(answers) != len(runs) {
		return failed(runs, fmt.Errorf("handler answered %d of %d entries", len(answers), len(runs)))
	}
	for i := range answers {
		answers[i].Err = n.readable(answers[i].Err, runs[i])
	}
	return answers
}

// failed answers all entries of a run with an error.
func failed(runs []*invalidation.Run, err error) []invalidation.BatchAnswer {
	return slices.Repeat([]invalidation.BatchAnswer{{Err: err}}, len(runs))
}

// firstError is the error of the oldest entry of a run that has one.
func firstError(answers []invalidation.BatchAnswer) error {
	for i := range answers {
		if err := answers[i].Err; err != nil {
			return err
		}
	}
	return nil
}

// readable returns the error of a handler, whose methods are called where no panic of theirs is an error: one that
// panics gives way to the error of that. The usual case is a nil pointer in a non-nil error.
func (n *Node) readable(err error, r *invalidation.Run) (readable error) {
	defer func() {
		if v := recover(); v != nil {
			readable = n.panicked(v, r)
		}
	}()
	if err != nil {
		var p *invalidation.PanicError
		_, _, _ = err.Error(), errors.Is(err, invalidation.ErrCancelled), errors.As(err, &p)
	}
	return err
}

// panicked logs that a handler panicked with v while it ran r, and returns the error of that.
func (n *Node) panicked(v any, r *invalidation.Run) error {
	n.cfg.Log.Error("handler panicked", "queue", r.Queue.Name, "entry", r.Entry.ID, "entries", len(r.Lock.Entries),
		"token", r.Lock.Token, "panic", v)
	return &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
}

// withCause adds why the context ended, where that is why the handler returned an error.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

var errExit = errors.New("the handler ended its goroutine (runtime.Goexit)")

// unlessExit calls f, and exit if f ends the goroutine: then nothing else of the caller follows.
func unlessExit(f, exit func()) {
	returned := false
	defer func() {
		if !returned {
			exit()
		}
	}()
	f()
	returned = true
}
