package worker

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Headers of every call, so that a worker can refuse a run whose lock is lost,
// stop in time, and recognise an entry that it has seen before.
const (
	headerEntry     = "Penstock-Entry"
	headerToken     = "Penstock-Token"
	headerAttempt   = "Penstock-Attempt"
	headerRemaining = "Penstock-Remaining-Ms"
	headerIdemKey   = "Idempotency-Key"
	headerCallback  = "Penstock-Callback" // where an asynchronous worker may report
	headerSource    = "X-Source"          // of the calls of the generic protocol
)

// SetSource sets the header by which a worker of the generic protocol tells calls of Penstock from those of other
// clients.
func SetSource(h http.Header) { h[headerSource] = []string{"dispatcher"} }

// OwnHeader reports whether only Penstock sets a header on calls to workers, by its canonical name: the source of a
// call, and the identity and fencing token of a run. Those of other clients must not reach a worker.
func OwnHeader(canonical string) bool {
	return canonical == headerSource || strings.HasPrefix(canonical, "Penstock-")
}

// setRun names the run on a request.
func setRun(h http.Header, run RunRef) {
	h.Set(headerEntry, run.Entry)
	h.Set(headerIdemKey, attemptID(run))
	h.Set(headerToken, strconv.FormatInt(run.Token, 10))
	h.Set(headerAttempt, strconv.Itoa(run.Attempt))
}

// attemptID names one attempt of an entry: under the entry's name alone a worker could take it for an
// earlier attempt that it still knows.
func attemptID(run RunRef) string { return run.Entry + "-" + strconv.FormatInt(run.Token, 10) }

// setRemaining passes the deadline on as milliseconds left: an instant would
// have to be read on the worker's clock.
func setRemaining(h http.Header, finishBy time.Time) {
	if !finishBy.IsZero() {
		h.Set(headerRemaining, strconv.FormatInt(millisecondsLeft(finishBy), 10))
	}
}

func millisecondsLeft(finishBy time.Time) int64 {
	return max(time.Until(finishBy).Milliseconds(), 0)
}

// traceParent is the header of W3C trace context. A call whose trace is not of this form goes without it: a trace is
// not worth an entry.
var traceParent = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

func setTrace(h http.Header, call Call) {
	if traceParent.MatchString(call.TraceParent) {
		h.Set("traceparent", call.TraceParent)
	}
}

// secretReference matches ${env:NAME} and ${file:/path} within a header value.
var secretReference = regexp.MustCompile(`\$\{((?:env|file):[^}]+)\}`)

var (
	headerName    = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
	secretishName = regexp.MustCompile(`(?i)^(authorization|proxy-authorization|cookie|.*(key|token|secret|password))$`)
)

// checkHeaders refuses headers that belong to the protocol, and secrets
// written out: the registry is readable by every client with access to a queue.
func checkHeaders(m Model) error {
	for name, value := range m.Headers {
		field := "headers." + name
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !headerName.MatchString(name):
			return fieldError(field, "is not a header name")
		case strings.ContainsAny(value, "\r\n\x00"):
			return fieldError(field, "must be one line")
		case reservedHeader(canonical):
			return fieldError(field, "is set by Penstock and cannot be overridden")
		case secretishName.MatchString(name) && !refersToSecret(value):
			return fieldError(field, "must refer to its secret as env:NAME or file:/path, not contain it")
		}
		for _, ref := range references(value) {
			if err := checkReference(ref); err != nil {
				return fieldError(field, "%v", err)
			}
		}
	}
	return nil
}

func reservedHeader(canonical string) bool {
	switch canonical {
	case "Host", "Content-Length", "Content-Type", "Transfer-Encoding", "Connection",
		"Traceparent", "Tracestate", "Prefer", headerIdemKey:
		return true
	}
	return OwnHeader(canonical)
}

func refersToSecret(value string) bool {
	return strings.HasPrefix(value, "env:") || strings.HasPrefix(value, "file:") ||
		secretReference.MatchString(value)
}

// references returns the references to secrets in a header value.
func references(value string) []string {
	if strings.HasPrefix(value, "env:") || strings.HasPrefix(value, "file:") {
		return []string{value}
	}
	var refs []string
	for _, match := range secretReference.FindAllStringSubmatch(value, -1) {
		refs = append(refs, match[1])
	}
	return refs
}

// HeaderError is the error of a header of a model that cannot be sent. Its text may name a variable or a file, never a
// secret.
type HeaderError struct {
	Header string
	Err    error
}

// Error implements error.
func (e *HeaderError) Error() string { return "resolve header " + e.Header + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *HeaderError) Unwrap() error { return e.Err }

// resolveHeaders replaces references by what read returns. It is done for every
// request, so that a rotated secret needs no restart.
func resolveHeaders(headers map[string]string, read func(ref string) (string, error)) (http.Header, error) {
	resolved := make(http.Header, len(headers)+10)
	for name, value := range headers {
		text, err := resolveSecrets(value, read)
		if err != nil {
			return nil, &HeaderError{Header: name, Err: err}
		}
		resolved.Set(name, text)
	}
	return resolved, nil
}

func resolveSecrets(value string, read func(ref string) (string, error)) (string, error) {
	if strings.HasPrefix(value, "env:") || strings.HasPrefix(value, "file:") {
		return read(value)
	}
	var failure error
	text := secretReference.ReplaceAllStringFunc(value, func(match string) string {
		secret, err := read(match[2 : len(match)-1])
		if err != nil && failure == nil {
			failure = err
		}
		return secret
	})
	return text, failure
}
