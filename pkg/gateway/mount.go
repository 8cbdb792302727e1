package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/stream"
)

// Mount adds a route beside the gateway's own. It must be called before the gateway serves. A body must arrive within a
// minute, however it is read, unless the handler sets a read deadline of its own; the rest of one that the handler has
// not read when it answers is read for a second at most.
// Each request is told to the observer.
func (g *Gateway) Mount(pattern string, handler http.HandlerFunc) {
	g.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		answer := httpserver.NewStatusWriter(w)
		defer func() { // also where an answer breaks off, which is a panic
			if o := g.config.Observer; o != nil {
				if r.Context().Err() != nil {
					answer.Status = statusLeft
				}
				o.Answered(pattern, answer.Status)
			}
		}()
		handler(answer, r)
	})
}

// Route serves a mounted route for a client that was let in.
type Route func(w http.ResponseWriter, r *http.Request, c Requester) error

// AdmitFunc lets a request in: Admit, or AdmitWithoutWork.
type AdmitFunc func(r *http.Request) (c Requester, leave func(), err error)

// MountFor is Mount for a route of clients, which admit lets in. refuse answers the errors of both.
func (g *Gateway) MountFor(pattern string, admit AdmitFunc, serve Route,
	refuse func(w http.ResponseWriter, r *http.Request, err error),
) {
	g.Mount(pattern, func(w http.ResponseWriter, r *http.Request) {
		c, leave, err := admit(r)
		defer leave()
		if err == nil {
			err = serve(w, r, c)
		}
		if err != nil {
			refuse(w, r, err)
		}
	})
}

// ReadBody reads the whole body of a request of a mounted route, of up to most bytes, as those of the gateway's own
// routes are: within the budget of the bodies of all requests, and within a minute. release must be called when the
// request has ended, error or not; the body is not valid behind it. An error is one for AnswerError.
func (g *Gateway) ReadBody(r *http.Request, c Requester, most int64) (body []byte, release func(), err error) {
	held, err := g.readBody(r, c.caller.held(), most)
	if held == nil {
		return nil, func() {}, err
	}
	return held.bytes(), held.letGo, err
}

// clientStall is how long a client may take for each part of an answer that is of no model.
const clientStall = 30 * time.Second

// AnswerJSON writes a whole answer, as application/json where no other type is set. A client that does not read it is
// cut.
func AnswerJSON(w http.ResponseWriter, r *http.Request, status int, body any) {
	text, err := json.Marshal(body)
	if err != nil {
		AnswerError(w, fmt.Errorf("write an answer: %w", err))
		return
	}
	if h := w.Header(); h["Content-Type"] == nil {
		h["Content-Type"] = []string{"application/json"}
	}
	stream.Whole(w, r, status, append(text, '\n'), clientStall)
}

// BadRequest returns an error that AnswerError answers with the status and code, in OpenAI's form. param names
// the field at fault; it may be empty.
func BadRequest(status int, code, param, format string, args ...any) error {
	return bad(status, code, param, format, args...)
}

// AnswerError writes an error as OpenAI's clients expect it, and returns the status.
func AnswerError(w http.ResponseWriter, err error) int {
	return answerError(w, err, http.StatusTooManyRequests)
}

// ErrorBody returns an error that a worker answered as OpenAI's clients expect it.
func ErrorBody(status int, code, message string) json.RawMessage {
	body := envelope{envelopeError{Message: message, Type: kindOf(status), Code: code}}
	text, _ := json.Marshal(body) // texts always have a form in JSON
	return text
}

// ErrorOf returns status and message of an error, for answers in another form.
func ErrorOf(err error) (status int, message string) {
	status, body := errorOf(err, http.StatusTooManyRequests)
	return status, body.Message
}

// ClipText returns a text of at most n bytes that databases take: it is cut at the end of a
// character, and bytes that are no UTF-8, and NUL, become U+FFFD.
func ClipText(text string, n int) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

// ErrPanicked is the error that Recover returns for a panic.
var ErrPanicked = errors.New("panic")

// Recover makes a panic the error of the function that defers it, with its stack: work on one item of many ends with
// an error of its own, and not with the process.
func Recover(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%w: %v\n%s", ErrPanicked, p, debug.Stack())
	}
}
