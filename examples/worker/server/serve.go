package server

import (
	"errors"
	"net/http"
	"slices"
)

// serveCall takes a call from its request to its answer.
func (s *Server) serveCall(w http.ResponseWriter, r *http.Request, model string) {
	if err := s.notReady(); err != nil {
		replyError(w, err)
		return
	}
	c, err := s.readCall(w, r, model)
	if err != nil {
		replyError(w, err)
		return
	}
	run, created, superseded, err := s.admit(c)
	if err != nil {
		replyError(w, err)
		return
	}
	drop := created && run.fate.drop
	if c.async {
		breakOff(drop)
		reply(w, http.StatusOK, s.snapshot(run))
		return
	}
	s.awaitRun(w, r, run, superseded, drop)
}

// awaitRun answers a synchronous call when its run ends, or earlier when a higher token took the run
// over. Nobody is there to answer when the connection closed.
func (s *Server) awaitRun(w http.ResponseWriter, r *http.Request, run *run, superseded <-chan struct{}, drop bool) {
	defer s.detach(run)
	select {
	case <-run.done:
	case <-superseded:
	case <-r.Context().Done():
		return
	}
	breakOff(drop)
	switch {
	case isClosed(superseded): // even if the run has ended meanwhile: its result is the newer caller's
		replyError(w, errStale)
	case run.err != nil:
		replyError(w, run.err)
	default:
		reply(w, http.StatusOK, outcome{Status: "success", Result: run.result})
	}
}

// breakOff ends the connection without an answer, where that is the fault to show.
func breakOff(drop bool) {
	if drop {
		panic(http.ErrAbortHandler)
	}
}

func isClosed(signal <-chan struct{}) bool {
	select {
	case <-signal:
		return true
	default:
		return false
	}
}

// serveStatus tells how an asynchronous run is doing.
func (s *Server) serveStatus(w http.ResponseWriter, r *http.Request) {
	run, err := s.runOf(r)
	if err != nil {
		replyError(w, err)
		return
	}
	reply(w, http.StatusOK, s.snapshot(run))
}

// serveCancel stops a run, found by its job id or its entry, and answers when its slot is free again:
// "cancelled", or the outcome that came first.
func (s *Server) serveCancel(w http.ResponseWriter, r *http.Request) {
	run, err := s.runOf(r)
	if err != nil {
		replyError(w, err)
		return
	}
	run.cancel(errCancelled)
	select {
	case <-run.done:
		o := s.snapshot(run)
		if errors.Is(run.err, errCancelled) {
			o.Status = "cancelled"
		}
		reply(w, http.StatusOK, o)
	case <-r.Context().Done():
	}
}

// runOf finds the run a path names, if the caller's token still stands.
func (s *Server) runOf(r *http.Request) (*run, error) {
	who, err := readCaller(r.Header)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.observe(who); err != nil {
		return nil, err
	}
	s.dropExpired()
	id := r.PathValue("id")
	run := s.byID[id]
	if run == nil {
		run = s.byKey["entry "+id]
	}
	if run == nil {
		return nil, errNoRun
	}
	return run, nil
}

// outcome is what the protocol says about a run.
type outcome struct {
	Status   string `json:"status"` // success, processing, completed, failed; queued for direct callers
	JobID    string `json:"job_id,omitempty"`
	Result   any    `json:"result,omitempty"`
	Error    string `json:"error,omitempty"`
	Position int    `json:"position,omitempty"` // in the direct queue, from 1
}

// snapshot describes a run as it is now. Telling an end to somebody counts as fetching it.
func (s *Server) snapshot(r *run) outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := outcome{JobID: r.id}
	switch r.state {
	case queued:
		o.Status, o.Position = "queued", s.position(r)
	case running:
		o.Status = "processing"
	case completed:
		o.Status, o.Result = "completed", r.result
	case failed:
		o.Status, o.Error = "failed", r.err.Error()
	}
	if r.ended() && r.pinned {
		s.markFetched(r)
	}
	return o
}

// position is a run's place in the direct queue, from 1. The caller holds mu.
func (s *Server) position(r *run) int {
	return slices.Index(s.direct, r) + 1
}
