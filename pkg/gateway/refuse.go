package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// envelope is OpenAI's form of an error.
type envelope struct {
	Error envelopeError `json:"error"`
}

type envelopeError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

// badRequest is an error of the request itself.
type badRequest struct {
	status              int
	code, param, detail string
}

func (b *badRequest) Error() string { return b.detail }

func bad(status int, code, param, format string, args ...any) error {
	return &badRequest{status, code, param, fmt.Sprintf(format, args...)}
}

func kindOf(status int) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

// pushRefusal is the answer to a push that the queue of a model refuses.
type pushRefusal struct {
	is            error
	status        int
	code, message string
}

var pushRefusals = []pushRefusal{
	{
		invalidation.ErrQueueFull, http.StatusTooManyRequests, "queue_full",
		"the queue of the model takes no more entries",
	},
	{
		invalidation.ErrIdempotencyConflict, http.StatusUnprocessableEntity, "idempotency_conflict",
		"the idempotency key was used with another request",
	},
	{
		invalidation.ErrNoInstance, http.StatusServiceUnavailable, "no_instance",
		"no instance of the model takes calls: send the request again later",
	},
	{
		invalidation.ErrQueueNotFound, http.StatusNotFound, "queue_not_found",
		"the queue of the model does not exist",
	},
}

// pushRefusalOf returns the answer to an error of a push. ok is false where it is no refusal that clients are told of.
func pushRefusalOf(err error) (r pushRefusal, ok bool) {
	for _, r := range pushRefusals {
		if errors.Is(err, r.is) {
			return r, true
		}
	}
	return pushRefusal{}, false
}

// errorOf returns the status of an error, and what clients read of it. full is the status for a pool without room.
func errorOf(err error, full int) (status int, body envelopeError) {
	status, body = http.StatusInternalServerError, envelopeError{Message: err.Error(), Code: "internal_error"}
	var b *badRequest
	var r *Rejection
	push, refused := pushRefusalOf(err)
	switch {
	case errors.As(err, &b):
		status, body.Code = b.status, b.code
		if b.param != "" {
			body.Param = &b.param
		}
	case errors.As(err, &r):
		status, body.Code = r.status(full), r.code()
	case refused:
		status, body.Message, body.Code = push.status, push.message, push.code
	}
	body.Type = kindOf(status)
	return status, body
}

// noInstanceAgain is the Retry-After of a request whose model has no instance: nothing tells when there will be one.
const noInstanceAgain = 5 * time.Second

// SetRetryAfter sets the header Retry-After of the answer to a refused request, where it is known when there will be
// room: of a pool, of a queue that takes no more entries, or of a token's limits; and where the model has no instance.
// Clients that were refused together are told different times.
func SetRetryAfter(w http.ResponseWriter, err error) {
	var r *Rejection
	var full *invalidation.FullError
	var wait time.Duration
	switch {
	case errors.As(err, &r):
		wait = r.RetryAfter
	case errors.As(err, &full):
		wait = full.RetryAfter
	case errors.Is(err, invalidation.ErrNoInstance):
		wait = noInstanceAgain
	}
	if wait > 0 {
		told := jitter(wait, rand.Float64()) //nolint:gosec // jitter
		w.Header()["Retry-After"] = []string{strconv.Itoa(seconds(told))}
	}
}

// answerError writes an error as OpenAI's clients expect it, with the reason in a header: the code, but for requests
// that were evicted. full is the status for a pool without room. It returns the status.
func answerError(w http.ResponseWriter, err error, full int) int {
	status, body := errorOf(err, full)
	reason := body.Code
	var r *Rejection
	if errors.As(err, &r) {
		reason = string(r.Reason)
	}
	w.Header()["X-Penstock-Dropped-Reason"] = []string{reason}
	SetRetryAfter(w, err)
	text, _ := json.Marshal(envelope{body}) // texts always have a form in JSON
	header := w.Header()
	header["Content-Type"] = []string{"application/json"}
	header["Content-Length"] = []string{strconv.Itoa(len(text))}
	if status == http.StatusUnauthorized {
		header["Www-Authenticate"] = []string{`Bearer realm="penstock"`}
	}
	w.WriteHeader(status)
	_, _ = w.Write(text) // the client may be gone
	return status
}

// jitter lengthens the wait in an answer by up to a quarter, and by retryMax at most, so that clients that were
// refused together do not come back together. A pool's wait stays within retryMax. part is from 0 to 1.
func jitter(d time.Duration, part float64) time.Duration {
	longer := d + time.Duration(part*float64(min(d/4, retryMax)))
	if d <= retryMax {
		return min(longer, retryMax)
	}
	return longer
}

// seconds rounds a Retry-After up: earlier than told makes no sense.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }
