package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// waitMax bounds how long a client may wait for an entry on its connection.
const waitMax = 10 * time.Minute

// prefers reads the header Prefer (RFC 7240): respond-async, and with it how long the client waits for the
// answer; 0: it does not. A wait that is no number of seconds is left out, as unknown preferences are.
func prefers(h http.Header) (async bool, wait time.Duration) {
	for _, value := range h.Values("Prefer") {
		for part := range strings.SplitSeq(value, ",") {
			name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "respond-async":
				async = true
			case "wait":
				if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil && n > 0 {
					wait = min(time.Duration(min(n, 86_400))*time.Second, waitMax)
				}
			}
		}
	}
	return async, wait
}

// asynchronous makes the request a durable entry at once, if its client wants no more than that. A model whose calls go
// on behind their answers is called by entries alone: the slot of a live call would be free while its run goes on.
func (s *serving) asynchronous(ctx context.Context) (done bool, err error) {
	async, wait := prefers(s.r.Header)
	switch {
	case s.route.model.Async && !async:
		return true, bad(http.StatusBadRequest, "async_only", "prefer",
			"the model %q runs asynchronously: send Prefer: respond-async, with wait=N for an answer within N seconds",
			s.route.model.Name)
	case s.route.model.Async:
		return true, s.push(ctx, wait)
	case !async:
		return false, nil
	}
	if wait == 0 {
		return true, s.push(ctx, 0)
	}
	if s.mayPush() && (s.ticket.TTL == 0 || s.ticket.TTL > wait) {
		s.ticket.TTL = wait // it becomes an entry then
	}
	return false, nil
}

// checkBackground refuses a response whose run would go on behind its answer: its slot would be idle meanwhile.
func (s *serving) checkBackground() error {
	operation, _ := Operation(s.r.URL.Path)
	if err := worker.CheckBackground(operation, s.asked.scanned.background); err != nil {
		return bad(http.StatusBadRequest, "background_unsupported", "background",
			"%s; to be answered before, send Prefer: respond-async", err.Error())
	}
	return nil
}

// mayPush says whether the request may become an entry where there is no room: by the policy, and since there is a
// queue and an operation of entries for it. Without these a refusal stays what it is, and the client may come again.
func (s *serving) mayPush() bool {
	if s.route.model.Policy.OnFull != OnFullPush || s.gateway.config.Push == nil {
		return false
	}
	if s.route.generic() {
		_, err := s.payload()
		return err == nil
	}
	_, durable := Operation(s.r.URL.Path)
	return durable
}

// pushInstead turns a refusal for want of room into a durable entry, where policy and client agree.
func (s *serving) pushInstead(ctx context.Context, err error) error {
	var r *Rejection
	if !errors.As(err, &r) || r.paused || !s.mayPush() {
		return err
	}
	async, wait := prefers(s.r.Header)
	switch r.Reason {
	case DropFlowFull, DropOverloaded, DropEvicted, DropTimeout, DropNoEndpoints, DropCold:
		if async && s.r.Context().Err() == nil {
			return s.push(ctx, max(0, wait-time.Since(s.began)))
		}
	}
	return err
}

// payload returns the payload of the entry that the request becomes: the one that makes a task node send the worker
// what it is sent of the request itself. Clients of an asynchronous model, whose requests are all entries, send the
// payload where the model has a template.
func (s *serving) payload() (json.RawMessage, error) {
	model, operation, durable := s.route.model, "", false
	if !s.route.generic() {
		if operation, durable = Operation(s.r.URL.Path); !durable {
			return nil, bad(http.StatusBadRequest, "async_unsupported", "prefer",
				"requests to %s cannot become entries: send it without Prefer: respond-async", s.r.URL.Path)
		}
		return DurablePayload(s.body, operation), nil // always: a member of the client's own must not decide
	}
	switch {
	case model.Template == "" && model.Protocol == worker.ProtocolCog:
		return predictionInput(s.body)
	case model.Template == "", model.Template == wholePayload, model.Async:
		return s.body, nil
	}
	return nil, bad(http.StatusBadRequest, "async_unsupported", "prefer",
		"the payloads of entries of model %q fill a template: send the call without Prefer: respond-async", model.Name)
}

// keyMax bounds the idempotency key of a request that becomes an entry, in bytes.
const keyMax = 255

// accepted is the answer to a request that became an entry.
type accepted struct {
	ID     string `json:"id"`
	Object string `json:"object"`
	Status string `json:"status"`
	Model  string `json:"model"`
}

// push makes the request an entry, and waits so long for its end. The answer is the entry's, or, without one, where the
// entry is to be found.
func (s *serving) push(ctx context.Context, wait time.Duration) error {
	if s.gateway.config.Push == nil {
		return bad(http.StatusServiceUnavailable, "async_unavailable", "",
			"this gateway has no queue to put the request into")
	}
	key := s.r.Header.Get("Idempotency-Key")
	if len(key) > keyMax || !utf8.ValidString(key) {
		return bad(http.StatusBadRequest, "invalid_header", "idempotency-key",
			"idempotency-key has more than %d bytes, or is not UTF-8", keyMax)
	}
	body, err := s.payload()
	if err != nil {
		return err
	}
	d := Durable{
		Model: s.route.model.Name, Queue: s.route.model.Queue, Flow: s.ticket.Flow, Criticality: s.ticket.Criticality,
		Body: body, Key: key, Token: s.record.Token,
	}
	if s.caller != nil {
		d.PriorityMax = s.caller.PriorityMax
	}
	if trace := s.r.Header.Get("Traceparent"); invalidation.ValidTraceParent(trace) {
		d.Trace = trace
	}
	if !s.ticket.Deadline.IsZero() {
		d.Within = max(time.Until(s.ticket.Deadline), time.Millisecond)
	}
	if may, refused := s.caller.pushes(time.Now(), 1); may == 0 && !s.acceptedBefore(ctx, d) {
		return refused
	}
	id, location, err := s.gateway.config.Push.Push(ctx, d)
	if _, refused := pushRefusalOf(err); refused {
		return err
	}
	if err != nil {
		s.gateway.log.Warn("push online request", "model", s.route.model.Name, "error", err)
		return bad(http.StatusServiceUnavailable, "async_unavailable", "",
			"the queue does not take the request now: send it again, or without Prefer: respond-async")
	}
	if wait > 0 {
		if done, err := s.awaited(ctx, wait, id, location); done || err != nil {
			return err
		}
	}
	h := s.w.Header()
	h["Location"] = []string{location}
	h["Preference-Applied"] = []string{"respond-async"}
	AnswerJSON(s.w, s.r, http.StatusAccepted, accepted{id, "penstock.entry", "queued", s.route.model.Name})
	s.record.Status = http.StatusAccepted
	return nil
}

// acceptedBefore says whether the request became an entry before, by its key: the client that lost the answer would
// take a refusal by the rate for that of its request.
func (s *serving) acceptedBefore(ctx context.Context, d Durable) bool {
	if d.Key == "" {
		return false
	}
	before, err := s.gateway.config.Push.AcceptedBefore(ctx, d)
	if err != nil {
		s.gateway.log.Warn("look up key of online request", "model", d.Model, "error", err)
	}
	return before
}

// awaited answers with the outcome of the entry that the request became, if it ends within wait. A request for a stream
// does not wait: its answer comes whole.
func (s *serving) awaited(ctx context.Context, wait time.Duration, id, location string) (done bool, err error) {
	if s.streams {
		return false, nil
	}
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	o, ended, err := s.gateway.config.Push.Await(bounded, s.route.model.Queue, id)
	switch {
	case err != nil: // it is an entry all the same
		s.gateway.log.Warn("wait for entry", "entry", id, "error", err)
		return false, nil
	case !ended, o.Outcome == "done" && KeptElsewhere(o.Result):
		return false, nil
	}
	s.w.Header()["Content-Location"] = []string{location}
	switch o.Outcome {
	case "done":
		s.w.Header()["Content-Type"] = []string{"application/json"}
		s.record.Status = http.StatusOK
		stream.Whole(s.w, s.r, http.StatusOK, o.Result, s.route.model.Policy.ClientStall.Duration())
		return true, nil
	case "expired":
		return true, &Rejection{Reason: DropDeadline, Detail: "entry " + id + " expired in the queue"}
	}
	return true, &Rejection{Reason: DropUpstream, Detail: "entry " + id + " " + o.Outcome + ": " + o.Reason}
}

// KeptElsewhere says whether a result is a reference to the object store, which is no answer to the client's request.
func KeptElsewhere(result json.RawMessage) bool {
	var stored struct {
		Object json.RawMessage `json:"$object"`
	}
	return json.Unmarshal(result, &stored) == nil && stored.Object != nil
}
