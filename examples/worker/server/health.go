package server

import (
	"encoding/json"
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

func (s *Server) serveFaults(w http.ResponseWriter, _ *http.Request) {
	reply(w, http.StatusOK, s.faults.get())
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
	faults := s.faults.get()
	faults.CrashAfter, faults.SlowStart = 0, 0 // both count from now, so the old ones are over
	if err := decodeFaults(body, &faults); err != nil {
		replyError(w, err)
		return
	}
	s.faults.set(faults)
	reply(w, http.StatusOK, faults)
}

func decodeFaults(body json.RawMessage, faults *Faults) error {
	if err := model.Decode(body, faults); err != nil {
		return err
	}
	return faults.Validate()
}

func (s *Server) clearFaults(w http.ResponseWriter, _ *http.Request) {
	if !s.cfg.AllowFaults {
		replyError(w, errNoFaults)
		return
	}
	s.faults.set(Faults{})
	reply(w, http.StatusOK, Faults{})
}
