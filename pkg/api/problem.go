package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Errors of requests as such; those of the queue are invalidation's.
var (
	errMalformed   = errors.New("the request is malformed")
	errMediaType   = errors.New("the body must be application/json")
	errTooMany     = errors.New("too many entries in one push")
	errBadData     = errors.New("the database cannot store this")
	errUnavailable = errors.New("the database is not available; try again")
	errTimeout     = errors.New("the request took too long; try again")
	errInternal    = errors.New("something went wrong here; the leader's log says what")
)

// statuses is the table from error to HTTP: the first row that matches counts. Codes are for programs and stay.
var statuses = []struct {
	err    error
	status int
	code   string
}{
	{errNoRoute, http.StatusNotFound, "no_such_address"},
	{errNoMethod, http.StatusMethodNotAllowed, "method_not_allowed"},
	{errMalformed, http.StatusBadRequest, "malformed"},
	{errMediaType, http.StatusUnsupportedMediaType, "not_json"},
	{errTooMany, http.StatusRequestEntityTooLarge, "too_many_entries"},
	{errBadData, http.StatusBadRequest, "invalid"},
	{invalidation.ErrQueueNotFound, http.StatusNotFound, "queue_not_found"},
	{invalidation.ErrEntryNotFound, http.StatusNotFound, "entry_not_found"},
	{invalidation.ErrInvalid, http.StatusBadRequest, "invalid"},
	{invalidation.ErrPayloadTooLarge, http.StatusRequestEntityTooLarge, "payload_too_large"},
	{invalidation.ErrIdempotencyConflict, http.StatusConflict, "idempotency_conflict"},
	{invalidation.ErrQueueFull, http.StatusTooManyRequests, "queue_full"},
	{invalidation.ErrState, http.StatusConflict, "state_conflict"},
	{errTimeout, http.StatusServiceUnavailable, "timeout"},
	{errUnavailable, http.StatusServiceUnavailable, "unavailable"},
	{errInternal, http.StatusInternalServerError, "internal"},
}

// Problem is a problem document.
type Problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Code   string `json:"code"` // the end of Type, for programs that compare

	// Of a full queue.
	Depth        *int64 `json:"depth,omitempty"`          // entries
	Capacity     *int64 `json:"capacity,omitempty"`       // entries
	RetryAfterMS *int64 `json:"retry_after_ms,omitempty"` // unless nothing drains
}

// problem looks err up in the table.
func problem(err error) Problem {
	for _, row := range statuses {
		if errors.Is(err, row.err) {
			p := Problem{Type: "urn:penstock:problem:" + row.code, Title: http.StatusText(row.status), Status: row.status, Code: row.code, Detail: err.Error()}
			var full *invalidation.FullError
			if errors.As(err, &full) {
				p.Depth, p.Capacity = &full.Depth, &full.Capacity
				if ms := full.RetryAfter.Milliseconds(); ms > 0 {
					p.RetryAfterMS = &ms
				}
			}
			return p
		}
	}
	return problem(errInternal)
}

// classify finds what the table has no word for.
func classify(ctx context.Context, err error) error {
	var tooLarge *http.MaxBytesError
	switch code := postgres.Code(err); {
	case errors.As(err, &tooLarge):
		return fmt.Errorf("the body is larger than %d bytes: %w", tooLarge.Limit, invalidation.ErrPayloadTooLarge)
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded), code == "57014":
		return errTimeout
	case strings.HasPrefix(code, "22"): // data exception, such as a NUL in a text
		return fmt.Errorf("%w: %w", errBadData, err)
	case code == "" && !known(err), code != "" && postgres.Unavailable(err):
		return errUnavailable
	case !known(err):
		return errInternal
	}
	return err
}

func known(err error) bool { return problem(err).Code != "internal" }

// report answers with a problem document, and logs what the client is not told.
func (a *API) report(w http.ResponseWriter, r *http.Request, err error) {
	told := classify(r.Context(), err)
	p := problem(told)
	if p.Status >= 500 && r.Context().Err() == nil {
		a.cfg.Log.ErrorContext(r.Context(), "request went wrong", "method", r.Method, "path", r.URL.Path, "code", p.Code, "error", err)
	}
	switch {
	case p.RetryAfterMS != nil:
		w.Header().Set("Retry-After", retryAfter(time.Duration(*p.RetryAfterMS)*time.Millisecond))
	case p.Status == http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, "application/problem+json", p.Status, p)
}

// retryAfter is in whole seconds, rounded up: a client that comes back too early comes in vain.
func retryAfter(d time.Duration) string {
	return strconv.Itoa(int(math.Ceil(d.Seconds())))
}

// writeJSON answers. An error in writing is the client's: it has gone.
func writeJSON(w http.ResponseWriter, mediaType string, status int, body any) {
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
