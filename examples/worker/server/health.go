package server

import (
	"net/http"

	"github.com/penstock/penstock/examples/worker/model"
)

// health is the worker's load, as the dispatcher compares it with the slots it holds.
type health struct {
	Status    string   `json:"status"` // ready; or starting, shutting down (503)
	Active    int      `json:"active_jobs"`
	Max       int      `json:"max_jobs"`
	Queued    int      `json:"queued"` // direct callers that wait
	Models    []string `json:"models"`
	Completed int      `json:"completed"` // runs since the start
	Failed    int      `json:"failed"`
}

func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	code, status := http.StatusOK, "ready"
	if err := s.notReady(); err != nil {
		code, status = http.StatusServiceUnavailable, err.Error()
	}
	body := health{Status: status, Max: s.cfg.Slots, Models: s.modelNames()}
	s.mu.Lock()
	body.Active, body.Queued, body.Completed, body.Failed = s.active, len(s.direct), s.completed, s.failed
	s.mu.Unlock()
	reply(w, code, body)
}

// serveFaults tells the faults as they are now.
func (s *Server) serveFaults(w http.ResponseWriter, _ *http.Request) {
	s.editFaults(w, func(*Faults) error { return nil })
}

// changeFaults sets the faults that the body names and leaves the others as they are.
func (s *Server) changeFaults(w http.ResponseWriter, r *http.Request) {
	if !s.cfg.AllowFaults {
		replyError(w, errNoFaults)
		return
	}
	body, err := s.readBody(w, r)
	if err != nil {
		replyError(w, err)
		return
	}
	s.editFaults(w, func(f *Faults) error { return model.Decode(body, f) })
}

func (s *Server) clearFaults(w http.ResponseWriter, _ *http.Request) {
	if !s.cfg.AllowFaults {
		replyError(w, errNoFaults)
		return
	}
	s.editFaults(w, func(f *Faults) error {
		*f = Faults{}
		return nil
	})
}

func (s *Server) editFaults(w http.ResponseWriter, edit func(*Faults) error) {
	faults, err := s.faults.change(edit)
	if err != nil {
		replyError(w, err)
		return
	}
	reply(w, http.StatusOK, faults)
}
