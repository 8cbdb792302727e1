package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/penstock/penstock/examples/worker/model"
)

var (
	errStale     = errors.New("stale token")
	errBusy      = errors.New("GPU busy")
	errQueueFull = errors.New("queue full")
	errStarting  = errors.New("starting")
	errDraining  = errors.New("shutting down")
	errReused    = errors.New("was used for a different call")
	errNoModel   = errors.New("no such model")
	errNoRun     = errors.New("no such job")
	errNoFaults  = errors.New("faults cannot be changed: start the worker with --allow-faults")
)

// malformedError is a request that could not be read at all.
type malformedError struct{ Reason string }

func (e *malformedError) Error() string { return e.Reason }

// statusClientClosed is the usual, unregistered code for a call that the client itself gave up.
const statusClientClosed = 499

// refusal is the body of every answer that is no outcome of a run.
// Refusals before a run carry detail; the end of a run carries status and error.
type refusal struct {
	Detail string `json:"detail,omitempty"`
	Field  string `json:"field,omitempty"`
	Status string `json:"status,omitempty"`
	Error  string `json:"error,omitempty"`
}

// explain is the one table from errors to answers.
func explain(err error) (int, refusal) {
	var (
		malformed *malformedError
		input     *model.InputError
		tooLarge  *http.MaxBytesError
	)
	switch {
	case errors.As(err, &malformed):
		return http.StatusBadRequest, refusal{Detail: err.Error()}
	case errors.As(err, &input):
		return http.StatusUnprocessableEntity, refusal{Detail: err.Error(), Field: input.Field}
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge, refusal{Detail: fmt.Sprintf("body is larger than %d bytes",
			tooLarge.Limit)}
	case errors.Is(err, errReused):
		return http.StatusUnprocessableEntity, refusal{
			Detail: "Idempotency-Key: " + err.Error(),
			Field:  "Idempotency-Key",
		}
	case errors.Is(err, errNoModel), errors.Is(err, errNoRun):
		return http.StatusNotFound, refusal{Detail: err.Error()}
	case errors.Is(err, errNoFaults):
		return http.StatusForbidden, refusal{Detail: err.Error()}
	case errors.Is(err, errStale):
		return http.StatusConflict, refusal{Error: err.Error()}
	case errors.Is(err, errQueueFull):
		return http.StatusServiceUnavailable, refusal{Detail: "Queue full"}
	case errors.Is(err, errBusy), errors.Is(err, errStarting), errors.Is(err, errDraining):
		return http.StatusServiceUnavailable, refusal{Detail: err.Error()}
	case errors.Is(err, errDeadline):
		return http.StatusGatewayTimeout, refusal{Status: "failed", Error: err.Error()}
	case errors.Is(err, errCancelled), errors.Is(err, errGone):
		return statusClientClosed, refusal{Status: "failed", Error: err.Error()}
	}
	return http.StatusInternalServerError, refusal{Status: "failed", Error: err.Error()}
}

func replyError(w http.ResponseWriter, err error) {
	code, body := explain(err)
	if code == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	reply(w, code, body)
}

func reply(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	// A caller that has gone cannot be told; its run was dealt with by its context.
	_ = enc.Encode(body)
}
