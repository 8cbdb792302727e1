package worker

import (
	"bytes"
	"encoding/json"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/duration"
)

// ClassifyAnswer turns an answer that is not a success into an outcome. request is what the worker was
// asked: what its error echoes of that says nothing about the worker.
//
//	429, 503 for want of room             busy: costs nothing
//	502, 504, 520, 524, 503 of Envoy      a proxy lost the worker, which may have begun: unknown
//	408                                   a proxy, or the server itself, gave up a call that took too long: unknown
//	303                                   the run goes on, and its answer is to be fetched elsewhere: unknown
//	other 503, other 3xx, 401, 403        not ready: costs nothing
//	521, 522, 523, 525, 526, 530          a proxy did not reach the worker: not ready
//	404, 405, 409, 410, 421, 426, 501,
//	400 of a port that wants TLS          misrouted: the instance or the route is to blame, until all agree
//	400, 413, 415, 422                    the request is refused for good
//	everything else                       it ran and failed, with the class that the text tells
func ClassifyAnswer(status int, header http.Header, body, request []byte) Outcome {
	message := errorText(body)
	class := classifyText(message, request)
	if class == ClassContextLost && status < 500 && status != http.StatusFailedDependency {
		class = ClassNone // a server whose device is gone does not blame the client
	}
	o := Outcome{StatusCode: status, Reason: Clip(reasonOf(status, message)), RetryAfter: retryAfter(header)}
	switch {
	case status == http.StatusTooManyRequests:
		o.Kind, o.Class = Busy, ClassBusy
	case status == http.StatusServiceUnavailable && class == ClassBusy:
		o.Kind, o.Class = Busy, ClassBusy
	case LostByProxy(status, body):
		o.Kind, o.Class, o.MaybeRunning = Unknown, class, true
	case status == http.StatusServiceUnavailable:
		o.Kind, o.Class, o.Starting = NotReady, class, saysStarting(message)
	case unreachedByProxy(status):
		o.Kind = NotReady
	case status == http.StatusSeeOther: // Modal's answer to a call of more than 150 s
		o.Kind, o.MaybeRunning = Unknown, true
		o.Reason = Clip("worker answered that the run goes on and its answer is to be fetched at another address, " +
			"which is not done: let it answer the call itself")
	case status >= 300 && status < 400:
		// Following would send our secrets to an unregistered address.
		o.Kind = NotReady
		o.Reason = Clip("worker answered with a redirect, which is not followed: register the final address")
	case blamesPlatform(status):
		o.Kind = NotReady
	case class == ClassOOM:
		o.Kind, o.Class = Failed, class // whatever the status that carries it
	case blamesRoute(status) || wantsTLS(status, message, request):
		o.Kind, o.Misrouted = NotReady, true
	case blamesInput(status):
		o.Kind, o.Class = Rejected, ClassInput
	case class == ClassBusy:
		o.Kind, o.Class = Busy, ClassBusy
	default: // 499 among them: only the canceller can say that it cancelled
		o.Kind, o.Class = Failed, class.OrTransient()
	}
	return o
}

// errorAfterOK classifies an error that came with status 200: servers that stream have promised success before they
// know. Where the call may have run, as it has once there was output, a lack of capacity is a failure.
func errorAfterOK(body, request []byte, mayHaveRun bool) Outcome {
	status := errorCode(body)
	if status >= 400 && status < 600 && !mayHaveRun {
		return ClassifyAnswer(status, http.Header{}, body, request)
	}
	text := errorText(body)
	class := classifyText(text, request).OrTransient()
	if class == ClassBusy {
		if !mayHaveRun {
			return Outcome{Kind: Busy, Class: ClassBusy, Reason: Clip(text)}
		}
		class = ClassTransient
	}
	return failed(class, text)
}

// errorCode finds a numeric code beside or inside the error; 0 when there is none.
func errorCode(body []byte) int {
	for _, path := range []string{"error.code", "code", "error.status_code", "status"} {
		raw, ok := lookup(body, path)
		var code int
		if ok && json.Unmarshal(raw, &code) == nil {
			return code
		}
	}
	return 0
}

// LostByProxy says whether an answer is that of a proxy whose connection to the worker was refused, broke or took too
// long: the worker may have had the call, as if that connection were our own. Cloudflare answers 520 or 524, Envoy 503
// with a reason, and Ray Serve and LiteLLM 408. That may also be the answer to a request which came too slowly, or
// which waited too long at the proxy: it does not tell whether the worker had the call.
func LostByProxy(status int, body []byte) bool {
	switch status {
	case http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusRequestTimeout, 520, 524:
		return true
	case http.StatusServiceUnavailable:
		body = body[:min(len(body), 2000)]
		return bytes.Contains(body, []byte("disconnect/reset before headers")) && envoyReset.Match(body)
	}
	return false
}

// envoyReset matches the reasons that Envoy gives where it had sent the request. With the others, such as "connection
// failure", "overflow" and "remote refused stream reset", the worker did not get it.
var envoyReset = regexp.MustCompile(`reset reason: (connection termination|remote reset|local reset|protocol error)`)

// unreachedByProxy lists the answers of Cloudflare when it has no connection to the worker: refused (521), timed out
// (522), no route (523), no TLS (525, 526), no tunnel or name (530).
func unreachedByProxy(status int) bool {
	return (status >= 521 && status <= 526 && status != 524) || status == 530
}

// blamesPlatform lists refusals for which no entry is to blame: credentials
// that the worker does not take, and requests that came before it takes any.
func blamesPlatform(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired, http.StatusTooEarly:
		return true
	}
	return false
}

// blamesRoute lists refusals of a server that does not have what was asked for: another server under
// a recycled address, an adapter that is not loaded, a wrong path.
func blamesRoute(status int) bool {
	switch status {
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusConflict, http.StatusGone,
		http.StatusMisdirectedRequest, http.StatusUpgradeRequired, http.StatusNotImplemented:
		return true
	}
	return false
}

// wantsTLS says whether an answer is that of nginx or of a server in Go whose port takes TLS alone: the instance is
// registered with http:// in place of https://.
func wantsTLS(status int, message string, request []byte) bool {
	if status != http.StatusBadRequest {
		return false
	}
	for _, phrase := range []string{
		"The plain HTTP request was sent to HTTPS port", "Client sent an HTTP request to an HTTPS server",
	} {
		if strings.Contains(message, phrase) && !bytes.Contains(request, []byte(phrase)) {
			return true
		}
	}
	return false
}

func blamesInput(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
		http.StatusUnprocessableEntity:
		return true
	}
	return false
}

// saysStarting reports whether a server that is not ready says that it will be.
func saysStarting(message string) bool {
	message = strings.ToLower(message)
	return strings.Contains(message, "loading") || strings.Contains(message, "starting") ||
		strings.Contains(message, "warming")
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
		"no cuda-capable device", "no cuda gpus are available", "fallen off the bus", "uncorrectable ecc",
		"device lost", "device_lost", "device removed", "device_removed", "context is destroyed",
		"enginedeaderror", "engine is dead", "enginecore encountered", "nccl error", "driver shutting down",
	}},
	{ClassBusy, []string{
		"gpu busy", "server busy", "at capacity", "queue is full", "queue full", "queue_full", "overloaded",
		"maximum pending requests", "too many requests", "too many pending", "no available slots",
		"exceeds maximum queue size", "rate limit",
	}},
}

// driverFault is how the driver of a GPU reports one: "Xid 79", "Xid (PCI:0000:3b:00): 48".
var driverFault = regexp.MustCompile(`\bxid[ :(]+(pci|[0-9])`)

// classifyText reads the class from a worker's error text; ClassNone when it says nothing that is
// known. A phrase that the request contains as well is no evidence: servers echo their input.
func classifyText(text string, request []byte) Class {
	text = strings.ToLower(text)
	asked := ""
	for _, c := range textClasses {
		for _, phrase := range c.phrases {
			if !strings.Contains(text, phrase) {
				continue
			}
			if asked == "" {
				asked = strings.ToLower(string(request))
			}
			if !strings.Contains(asked, phrase) {
				return c.class
			}
		}
		if fault := driverFault.FindString(text); c.class == ClassContextLost && fault != "" &&
			!strings.Contains(strings.ToLower(string(request)), fault) {
			return c.class
		}
	}
	return ClassNone
}

// OrTransient returns the class, and transient where nothing is known.
func (c Class) OrTransient() Class {
	if c == ClassNone {
		return ClassTransient
	}
	return c
}

// namedClass takes the class that a worker states itself, in error_class.
func namedClass(name, text string, request []byte) Class {
	switch c := Class(name); c {
	case ClassOOM, ClassContextLost, ClassBusy, ClassInput, ClassTransient:
		return c
	}
	return classifyText(text, request).OrTransient()
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

// toldMax bounds what is told of the header Retry-After of an answer. Calls are kept back for RetryAfterMax at most.
const toldMax = time.Hour

// retryAfter is how long the header of an answer asks to wait; 0 for none.
func retryAfter(header http.Header) time.Duration {
	return duration.RetryAfter(header, time.Now(), toldMax)
}
