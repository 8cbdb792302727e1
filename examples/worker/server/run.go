package server

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// Why a run ended before its model did.
var (
	errCancelled = errors.New("cancelled")
	errDeadline  = errors.New("deadline exceeded")
	errGone      = errors.New("caller gone")
)

type state int

const (
	queued state = iota
	running
	completed
	failed
)

// run is one execution of a model, shared by all calls that attached to it.
// The fields above the blank line never change; the rest is guarded by Server.mu.
type run struct {
	id, key, model string
	print          [32]byte
	work           func(context.Context) (any, error)
	fate           fate
	ctx            context.Context
	cancel         context.CancelCauseFunc
	granted        chan struct{} // closed when it has a slot
	done           chan struct{} // closed when it has ended; result, err and state are fixed then

	state      state
	token      uint64
	waiters    int           // synchronous calls that wait for it
	pinned     bool          // has an asynchronous caller: outlives its waiters
	fetched    bool          // its end was told to an asynchronous caller
	superseded chan struct{} // closed and replaced when a higher token attaches
	deadline   *time.Timer
	endedAt    time.Time
	result     json.RawMessage
	err        error
}

func newRun(c *call, f fate) *run {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &run{
		id: "job_" + rand.Text(), key: c.key, model: c.model, print: c.print, work: c.work, fate: f,
		ctx: ctx, cancel: cancel, granted: make(chan struct{}), done: make(chan struct{}),
		token: c.token, superseded: make(chan struct{}),
	}
}

// accepts tells whether c may attach to the run instead of starting another one.
// A higher token is a new attempt: it takes over what runs and what succeeded, and repeats what failed.
func (r *run) accepts(c *call) bool {
	if c.token == r.token && r.pinned {
		return true
	}
	return r.state == completed || !r.ended() && r.ctx.Err() == nil
}

// attach joins c to the run. The caller holds Server.mu.
func (r *run) attach(c *call) {
	if c.token > r.token {
		r.token = c.token
		close(r.superseded)
		r.superseded = make(chan struct{})
	}
	if c.async {
		r.pinned = true
	} else {
		r.waiters++
	}
	if c.hasDeadline && !r.ended() {
		if r.deadline == nil {
			r.deadline = time.AfterFunc(c.remaining, func() { r.cancel(errDeadline) })
		} else {
			r.deadline.Reset(c.remaining)
		}
	}
}

func (r *run) ended() bool { return r.state == completed || r.state == failed }

// drive takes a run from admission to its end. Its slot is held until the model has really stopped.
func (s *Server) drive(r *run) {
	defer s.live.Done()
	select {
	case <-r.granted:
		result, err := s.compute(r)
		s.end(r, result, err)
	case <-r.ctx.Done():
		s.end(r, nil, context.Cause(r.ctx))
	}
}

// compute runs the model with the faults that were rolled for this run.
func (s *Server) compute(r *run) (result json.RawMessage, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Log.Error("model panicked", "job", r.id, "model", r.model, "panic", p, "stack", string(debug.Stack()))
			result, err = nil, fmt.Errorf("model %s panicked: %v", r.model, p)
		}
	}()
	if r.fate.delay > 0 {
		select {
		case <-time.After(r.fate.delay):
		case <-r.ctx.Done():
		}
	}
	if r.fate.hang {
		<-r.ctx.Done()
	}
	if r.ctx.Err() != nil {
		return nil, context.Cause(r.ctx)
	}
	if r.fate.crash {
		s.cfg.Exit(crashCode)
	}
	if r.fate.fail {
		return nil, errInjected
	}
	value, err := r.work(r.ctx)
	switch {
	case err != nil && r.ctx.Err() != nil:
		return nil, context.Cause(r.ctx)
	case err != nil:
		return nil, err
	}
	return json.Marshal(value)
}

// crashCode is the exit status of an injected crash.
const crashCode = 3

// end fixes the outcome, and passes the slot on to the direct caller who waits longest.
func (s *Server) end(r *run, result json.RawMessage, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.state == running {
		s.active--
	} else {
		s.leaveQueue(r)
	}
	r.result, r.err, r.endedAt, r.state = result, err, time.Now(), completed
	if err != nil {
		r.state = failed
		s.failed++
	} else {
		s.completed++
	}
	r.cancel(nil)
	if r.deadline != nil {
		r.deadline.Stop()
	}
	close(r.done)
	if r.pinned {
		s.keep(r)
	} else {
		s.forget(r)
	}
	s.grantNext()
	s.cfg.Log.Debug("run ended", "job", r.id, "model", r.model, "entry", r.key, "token", r.token, "error", err)
}
