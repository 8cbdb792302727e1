package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
)

// prefers reads the header Prefer (RFC 7240): respond-async, and with it a wait.
func prefers(h http.Header) (async, waits bool) {
	for _, value := range h.Values("Prefer") {
		for part := range strings.SplitSeq(value, ",") {
			name, _, _ := strings.Cut(strings.TrimSpace(part), "=")
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "respond-async":
				async = true
			case "wait":
				waits = true
			}
		}
	}
	return async, waits
}

// asynchronous makes the request a durable entry at once, if its client wants no more than that.
func (s *serving) asynchronous(ctx context.Context) (done bool, err error) {
	async, waits := prefers(s.r.Header)
	if !async || waits {
		return false, nil
	}
	return true, s.push(ctx)
}

// pushInstead turns a refusal for want of room into a durable entry, where policy and client agree.
func (s *serving) pushInstead(ctx context.Context, err error) error {
	var r *Rejection
	if !errors.As(err, &r) || s.route.model.Policy.OnFull != OnFullPush {
		return err
	}
	async, _ := prefers(s.r.Header)
	switch r.Reason {
	case DropFlowFull, DropOverloaded, DropEvicted, DropTimeout, DropNoEndpoints, DropCold:
		if async && s.r.Context().Err() == nil {
			return s.push(ctx)
		}
	}
	return err
}

// accepted is the answer to a request that became an entry.
type accepted struct {
	ID     string `json:"id"`
	Object string `json:"object"`
	Status string `json:"status"`
	Model  string `json:"model"`
}

func (s *serving) push(ctx context.Context) error {
	if s.gateway.config.Push == nil {
		return bad(http.StatusServiceUnavailable, "async_unavailable", "",
			"this gateway has no queue to put the request into")
	}
	body := s.body
	if !s.route.generic() {
		operation, ok := Operation(s.r.URL.Path)
		if !ok {
			return bad(http.StatusBadRequest, "async_unsupported", "prefer",
				"requests to %s cannot become entries: send it without Prefer: respond-async", s.r.URL.Path)
		}
		if operation != s.route.model.Operation {
			body = DurablePayload(body, operation)
		}
	}
	id, location, err := s.gateway.config.Push.Push(ctx, Durable{
		Model: s.route.model.Name, Queue: s.route.model.Queue, Flow: s.ticket.Flow, Class: s.ticket.Class,
		Body: body, ID: s.entry.ID, Token: s.entry.Token,
	})
	if err != nil {
		s.gateway.log.Warn("push online request", "model", s.route.model.Name, "error", err)
		return bad(http.StatusServiceUnavailable, "async_unavailable", "",
			"the queue does not take the request now: send it again, or without Prefer: respond-async")
	}
	h := s.w.Header()
	h["Location"] = []string{location}
	h["Preference-Applied"] = []string{"respond-async"}
	h["Content-Type"] = []string{"application/json"}
	s.w.WriteHeader(http.StatusAccepted)
	// the client may be gone
	_ = json.NewEncoder(s.w).Encode(accepted{
		id, "penstock.entry", "queued",
		s.route.model.Name,
	})
	s.entry.Status = http.StatusAccepted
	return nil
}
