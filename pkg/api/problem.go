package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/scale/simulate"
)

// Errors of requests as such; those of the queue are invalidation's.
var (
	errMalformed = errors.New("the request is malformed")
	errInvalid   = errors.New("the request is not valid")
	errMediaType = errors.New("the body must be application/json")
	errTooMany   = errors.New("too many entries in one push")
	errLoop      = errors.New("entries push one another without end")
	errSlow      = errors.New("the body came too slowly")
	errTaken     = errors.New("another change came in between; try again")
	errHeld      = errors.New("a transaction that does not end holds what this would change: let it end, or end " +
		"it (penstock doctor names those that last), and try again")
	errUnavailable = errors.New("the database is not available; try again")
	errTimeout     = errors.New("the request took too long; try again")
	errUnstorable  = errors.New("a value of the request cannot be stored: it is outside the range of its field, too " +
		"large or too deep, or has a character that texts cannot have")
	errInternal = errors.New("something went wrong here; the leader's log says what")
	errGone     = errors.New("the client ended the request before its answer")
)

// statuses is the table from error to HTTP: the first row that matches counts. Codes are for programs and stay.
var statuses = []struct {
	err    error
	status int
	code   string
}{
	{errNoRoute, http.StatusNotFound, "no_such_address"},
	{errNoMethod, http.StatusMethodNotAllowed, "method_not_allowed"},
	{errNoToken, http.StatusUnauthorized, "unauthorized"},
	{errElsewhere, http.StatusMisdirectedRequest, "not_local"},
	{errForbidden, http.StatusForbidden, "forbidden"},
	{errMalformed, http.StatusBadRequest, "malformed"},
	{errMediaType, http.StatusUnsupportedMediaType, "not_json"},
	{errTooMany, http.StatusRequestEntityTooLarge, "too_many_entries"},
	{errSlow, http.StatusRequestTimeout, "body_too_slow"},
	{errCut, http.StatusBadRequest, "malformed"},
	{errEncoding, http.StatusUnsupportedMediaType, "not_gzip"},
	{errEncoded, http.StatusUnsupportedMediaType, "encoded"},
	{errBomb, http.StatusRequestEntityTooLarge, "payload_too_large"},
	{errKeyInUse, http.StatusConflict, "idempotency_key_in_use"},
	{errBusy, http.StatusServiceUnavailable, "busy"},
	{errRate, http.StatusTooManyRequests, "rate_exceeded"},
	{errLookups, http.StatusServiceUnavailable, "busy"},
	{errLists, http.StatusServiceUnavailable, "busy"},
	{errOwnLists, http.StatusTooManyRequests, "too_many_requests"},
	{simulate.ErrBusy, http.StatusServiceUnavailable, "busy"},
	{invalidation.ErrTooManyWaiters, http.StatusServiceUnavailable, "too_many_waiters"},
	{errInvalid, http.StatusUnprocessableEntity, "invalid"},
	{errUnstorable, http.StatusUnprocessableEntity, "invalid"},
	{errUnconditional, http.StatusPreconditionRequired, "precondition_required"},
	{errChanged, http.StatusPreconditionFailed, "precondition_failed"},
	{errTaken, http.StatusConflict, "state_conflict"},
	{errHeld, http.StatusConflict, "state_conflict"},
	{errLoop, http.StatusConflict, "loop"},
	{invalidation.ErrQueueNotFound, http.StatusNotFound, "queue_not_found"},
	{invalidation.ErrEntryNotFound, http.StatusNotFound, "entry_not_found"},
	{invalidation.ErrNotFound, http.StatusNotFound, "not_found"},
	{invalidation.ErrInvalid, http.StatusUnprocessableEntity, "invalid"},
	{invalidation.ErrPayloadTooLarge, http.StatusRequestEntityTooLarge, "payload_too_large"},
	{invalidation.ErrIdempotencyConflict, http.StatusUnprocessableEntity, "idempotency_conflict"},
	{invalidation.ErrQueueFull, http.StatusTooManyRequests, "queue_full"},
	{invalidation.ErrNoInstance, http.StatusServiceUnavailable, "no_instance"},
	{invalidation.ErrState, http.StatusConflict, "state_conflict"},
	{invalidation.ErrLockLost, http.StatusConflict, "lock_lost"},
	{errNotYet, http.StatusServiceUnavailable, "not_yet"},
	{errTimeout, http.StatusServiceUnavailable, "timeout"},
	{errUnavailable, http.StatusServiceUnavailable, "unavailable"},
	{errGone, httpserver.StatusClientGone, "client_gone"},
	{errInternal, http.StatusInternalServerError, "internal"},
}

// sqlstates are those that have an error of this package; sentinel adds those of package invalidation.
var sqlstates = map[string]error{
	"PS011":                       errLoop,
	postgres.QueryCanceled:        errTimeout,
	postgres.SerializationFailure: errTaken,
	postgres.DeadlockDetected:     errTaken,
	postgres.LockNotAvailable:     errHeld,
}

// sentinel is the error that an SQLSTATE stands for, nil for others.
func sentinel(sqlstate string) error {
	return cmp.Or(sqlstates[sqlstate], invalidation.Sentinel(sqlstate))
}

// Problem is a problem document.
type Problem struct {
	Type   string `json:"type" doc:"urn:penstock:problem: and the code."`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty" doc:"For people."`
	Code   string `json:"code" doc:"For programs; it stays."`
	Errors []Flaw `json:"errors,omitempty" nullable:"false" doc:"What is wrong with the request, and where."`

	// Of a full queue; retry_after_ms also of a token that pushes too fast.
	Flow         *string `json:"flow,omitempty" doc:"That is full; absent: the queue is."`
	Depth        *int64  `json:"depth,omitempty" doc:"Entries in the full queue, or of the full flow."`
	Capacity     *int64  `json:"capacity,omitempty" doc:"Entries that it takes."`
	RetryAfterMS *int64  `json:"retry_after_ms,omitempty" doc:"When room can be expected; absent if nothing drains."`

	Summary *Streamed `json:"summary,omitempty" doc:"How far a stream came before the problem."`
}

// Flaw is one thing that is wrong with a request.
type Flaw struct {
	Location string `json:"location,omitempty" doc:"As in body.reason or query.limit."`
	Message  string `json:"message"`
}

// Error makes it an error of a handler.
func (p *Problem) Error() string { return p.Detail }

// GetStatus is the status of the answer.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType is that of problem documents.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// GetHeaders says when to come back, and how to get in.
func (p *Problem) GetHeaders() http.Header {
	header := http.Header{}
	switch {
	case p.RetryAfterMS != nil:
		header.Set("Retry-After", retryAfter(time.Duration(*p.RetryAfterMS)*time.Millisecond))
	case p.Status == http.StatusServiceUnavailable, p.Code == "idempotency_key_in_use", p.Code == "too_many_requests":
		header.Set("Retry-After", "1")
	case p.Status == http.StatusUnauthorized:
		header.Set("WWW-Authenticate", `Bearer realm="penstock"`)
	}
	return header
}

// problem looks err up in the table.
func problem(err error) *Problem {
	for _, row := range statuses {
		if errors.Is(err, row.err) {
			p := &Problem{
				Type: "urn:penstock:problem:" + row.code, Title: http.StatusText(row.status),
				Status: row.status, Code: row.code, Detail: detail(row.err, err),
			}
			var full *invalidation.FullError
			if errors.As(err, &full) {
				p.Flow, p.Depth, p.Capacity = full.Flow, &full.Depth, &full.Capacity
				if ms := full.RetryAfter.Milliseconds(); ms > 0 {
					p.RetryAfterMS = &ms
				}
			}
			var fast *rateError
			if errors.As(err, &fast) && fast.wait > 0 {
				ms := fast.wait.Milliseconds() + 1
				p.RetryAfterMS = &ms
			}
			var field *fieldError
			if errors.As(err, &field) {
				location := objectOf(err)
				if field.inPath {
					location = "path"
				}
				p.Errors = []Flaw{{Location: location + "." + field.field, Message: field.message()}}
			}
			var broken *brokenStream
			if errors.As(err, &broken) {
				p.Summary = &broken.sum
			}
			return p
		}
	}
	return problem(errInternal)
}

// objectOf is the location of the object in the body that an error is about.
func objectOf(err error) string {
	var of *entryError
	if errors.As(err, &of) {
		return fmt.Sprintf("body[%d]", of.number-1)
	}
	return "body"
}

// detail is the text of an error without the words that its code says, too. Of what Postgres itself refused,
// rather than a function of the schema, only the class is told: its words show statements and are not for
// clients.
func detail(class, err error) string {
	if state := postgres.Code(err); state != "" && !strings.HasPrefix(state, "PS") {
		return class.Error()
	}
	text := strings.TrimSuffix(err.Error(), ": "+invalidation.ErrInvalid.Error())
	if sentence, is := strings.CutSuffix(text, ".: "+class.Error()); is {
		return sentence + "." // of the database, which names the class itself
	}
	return text
}

// classify finds what the table has no word for.
func classify(ctx context.Context, err error) error {
	var tooLarge *http.MaxBytesError
	switch code := postgres.Code(err); {
	case errors.As(err, &tooLarge):
		return fmt.Errorf("the body is larger than %d bytes: %w", tooLarge.Limit, invalidation.ErrPayloadTooLarge)
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return errTimeout
	case errors.Is(context.Cause(ctx), context.Canceled) && !known(err):
		return errGone // what failed was given up for it
	case sentinel(code) != nil && !known(err):
		return fmt.Errorf("%w: %w", err, sentinel(code))
	case postgres.RefusesValues(err): // such as a NUL in a text
		return fmt.Errorf("%w: %w", errUnstorable, err)
	case away(err) && !known(err):
		return errUnavailable
	case !known(err):
		return errInternal
	}
	return err
}

// away reports whether the same request can succeed a moment later: the database could not be reached, did not answer
// or refused work for a temporary reason, or the work was given up. A value that cannot be read is none of these.
func away(err error) bool {
	if postgres.Code(err) != "" {
		return postgres.Unavailable(err)
	}
	return postgres.Disconnected(err) || errors.Is(err, context.Canceled)
}

func known(err error) bool { return problem(err).Code != "internal" }

// problemOf makes the problem document of an error, and logs what the client does not get.
func (a *API) problemOf(ctx context.Context, err error) *Problem {
	p := problem(classify(ctx, err))
	if p.Status >= 500 {
		a.cfg.OnError(ctx, err)
	}
	if p.Code == "unavailable" {
		a.ready.forget()
	}
	refused := p.Code == "busy" || p.Code == "too_many_waiters" || p.Code == "not_yet" || p.Code == "no_instance"
	if p.Status >= 500 && ctx.Err() == nil && !refused {
		a.cfg.Log.ErrorContext(ctx, "request went wrong", "code", p.Code, "error", err)
	}
	return p
}

// report answers with a problem document.
func (a *API) report(w http.ResponseWriter, r *http.Request, err error) {
	p := a.problemOf(r.Context(), err)
	for name, values := range p.GetHeaders() {
		w.Header()[name] = values
	}
	writeJSON(w, p.ContentType(""), p.Status, p)
}

// problemDocument turns an error that was found in a request before its handler into a problem document. Values are
// left out: they may be secrets, and the client knows them.
func problemDocument(_ huma.Context, _ string, body any) (any, error) {
	model, theirs := body.(*huma.ErrorModel)
	if !theirs {
		return body, nil
	}
	var is error
	switch model.Status {
	case http.StatusBadRequest:
		is = errMalformed
	case http.StatusRequestEntityTooLarge:
		is = invalidation.ErrPayloadTooLarge
	case http.StatusUnsupportedMediaType:
		is = errMediaType
	case http.StatusRequestTimeout:
		is = errSlow
	case http.StatusUnprocessableEntity:
		is = errInvalid
	default:
		is = errInternal
	}
	p := problem(is)
	p.Status, p.Title = model.Status, http.StatusText(model.Status)
	for _, e := range model.Errors {
		message := e.Message
		if strings.HasPrefix(message, "invalid date/time for format ") { // which is in the words of a library of Go
			message = "want a time such as 2026-01-31T12:00:00Z (RFC 3339); the plus of an offset, as in " +
				"2026-01-31T17:30:00%2B05:30, is written %2B"
		}
		p.Errors = append(p.Errors, Flaw{Location: e.Location, Message: message})
	}
	if len(p.Errors) > 0 {
		p.Detail = fmt.Sprintf("%s: %s (%s)", p.Detail, p.Errors[0].Message, p.Errors[0].Location)
	} else {
		p.Detail += ": " + model.Detail
	}
	return p, nil
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
