package worker

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// classifyStatus turns an answer that is not a success into an outcome. The
// rule, over all protocols: capacity and readiness cost nothing, a refusal of
// the request is final, everything else failed.
func classifyStatus(status int, header http.Header, body []byte) Outcome {
	message := errorText(body)
	class := classifyText(message)
	o := Outcome{StatusCode: status, Reason: Clip(reasonOf(status, message)), RetryAfter: retryAfter(header)}
	switch {
	case status == http.StatusTooManyRequests:
		o.Kind, o.Class = Busy, ClassBusy
	case status == http.StatusServiceUnavailable && class == ClassBusy:
		o.Kind, o.Class = Busy, ClassBusy
	case status == http.StatusServiceUnavailable:
		o.Kind, o.Class = NotReady, class
	case status == http.StatusBadGateway || status == http.StatusGatewayTimeout:
		// A proxy speaks: the worker behind it may have begun.
		o.Kind, o.Class, o.MaybeRunning = NotReady, class, true
	case status >= 300 && status < 400:
		// Following would carry our secrets to an address nobody registered.
		o.Kind, o.Reason = NotReady, Clip("worker answered with a redirect, which is not followed: register the final address")
	case blamesPlatform(status):
		o.Kind = NotReady
	case status == 499: // Ollama: the run was stopped because somebody cancelled or hung up
		o.Kind = Cancelled
	case status >= 400 && status < 500:
		o.Kind, o.Class = Rejected, ClassInput
	case class == ClassBusy:
		o.Kind, o.Class = Busy, ClassBusy
	default:
		o.Kind, o.Class = Failed, class.OrTransient()
	}
	return o
}

// blamesPlatform lists refusals for which no entry is to blame: credentials
// that the worker does not take, and requests that reached it too slowly.
func blamesPlatform(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired,
		http.StatusRequestTimeout, http.StatusTooEarly:
		return true
	}
	return false
}

// textClasses are phrases that frameworks and drivers print, in the order in
// which they are looked for: "CUDA error: out of memory" is a lack of memory,
// any other CUDA error has cost the process its context.
var textClasses = []struct {
	class   Class
	phrases []string
}{
	{ClassOOM, []string{
		"out of memory", "outofmemory", "out_of_memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed",
		"bad_alloc", "cannot allocate memory", "unable to allocate", "failed to allocate", "not enough memory",
		"insufficient memory", "oom-killed", "oomkilled", "no available memory for the cache blocks",
	}},
	{ClassContextLost, []string{
		"illegal memory access", "device-side assert", "unspecified launch failure", "cudaerrorlaunchfailure",
		"cuda error", "cuda_error_", "hip error", "hiperror", "cudnn_status_", "cublas_status_",
		"no cuda-capable device", "no cuda gpus are available", "fallen off the bus", "xid", "uncorrectable ecc",
		"device lost", "device_lost", "device removed", "device_removed", "context is destroyed",
		"enginedeaderror", "engine is dead", "enginecore encountered", "nccl error", "driver shutting down",
	}},
	{ClassBusy, []string{
		"gpu busy", "server busy", "at capacity", "queue is full", "queue full", "queue_full", "overloaded",
		"maximum pending requests", "too many requests", "too many pending", "no available slots",
		"exceeds maximum queue size", "rate limit",
	}},
}

// classifyText reads the class from a worker's error text; ClassNone when it
// says nothing that is known.
func classifyText(text string) Class {
	text = strings.ToLower(text)
	for _, c := range textClasses {
		for _, phrase := range c.phrases {
			if containsWord(text, phrase) {
				return c.class
			}
		}
	}
	return ClassNone
}

// containsWord is strings.Contains, except that the phrase must not begin in
// the middle of a word: "xid" is a driver's error, "oxide" a material.
func containsWord(text, phrase string) bool {
	for at := 0; ; {
		i := strings.Index(text[at:], phrase)
		if i < 0 {
			return false
		}
		at += i
		end := at + len(phrase)
		startsWord := at == 0 || !isLetter(text[at-1]) || len(phrase) > 4
		endsWord := end == len(text) || !isLetter(text[end]) || len(phrase) > 4
		if startsWord && endsWord {
			return true
		}
		at++
	}
}

func isLetter(b byte) bool { return b >= 'a' && b <= 'z' }

// OrTransient returns the class, and transient where nothing is known.
func (c Class) OrTransient() Class {
	if c == ClassNone {
		return ClassTransient
	}
	return c
}

// namedClass takes the class that a worker states itself, in error_class.
func namedClass(name, text string) Class {
	switch c := Class(name); c {
	case ClassOOM, ClassContextLost, ClassBusy, ClassInput, ClassTransient:
		return c
	}
	return classifyText(text).OrTransient()
}

// errorText digs the message out of the error bodies that workers send:
// {"error":"..."}, {"error":{"message":"..."}}, {"detail":...}, {"message":"..."},
// or plain text.
func errorText(body []byte) string {
	var reply struct {
		Error   json.RawMessage `json:"error"`
		Detail  json.RawMessage `json:"detail"`
		Message string          `json:"message"`
	}
	if json.Unmarshal(body, &reply) != nil {
		return strings.TrimSpace(string(body[:min(len(body), 2000)]))
	}
	for _, raw := range []json.RawMessage{reply.Error, reply.Detail} {
		if text := textOf(raw); text != "" {
			return text
		}
	}
	if reply.Message != "" {
		return reply.Message
	}
	return strings.TrimSpace(string(body[:min(len(body), 2000)]))
}

func textOf(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var object struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(raw, &object) == nil && object.Message != "" {
		return object.Message
	}
	return string(raw)
}

func reasonOf(status int, message string) string {
	if message == "" {
		return "worker answered " + strconv.Itoa(status) + " " + http.StatusText(status)
	}
	return "worker answered " + strconv.Itoa(status) + ": " + message
}

// retryAfterMax bounds what a worker may ask for, so that one wrong header does
// not park an entry for a year.
const retryAfterMax = time.Hour

// retryAfter reads the header in both of its forms (RFC 9110, 10.2.3). A date
// is compared with the worker's own Date, so that its clock does not matter.
func retryAfter(header http.Header) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseFloat(value, 64); err == nil {
		if !(seconds > 0) {
			return 0
		}
		return time.Duration(min(seconds, retryAfterMax.Seconds()) * float64(time.Second))
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	sent, err := http.ParseTime(header.Get("Date"))
	if err != nil {
		sent = time.Now()
	}
	return min(max(at.Sub(sent), 0), retryAfterMax)
}
