package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/penstock/penstock/pkg/worker"
)

// Requester is the sender of a request, by its token. The zero value is that of an open gateway.
type Requester struct {
	Name   string // of the token
	Flow   string // of the entries that it pushes
	caller *caller
}

// admitted returns the caller of a request; nil in an open gateway.
func (g *Gateway) admitted(r *http.Request) (*caller, error) {
	if g.config.Open {
		return nil, nil //nolint:nilnil // no session
	}
	kind, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(kind, "bearer") {
		secret = r.Header.Get("X-Api-Key") // as Anthropic's clients send it
	}
	if c := g.tokens.find(strings.TrimSpace(secret), time.Now()); c != nil {
		return c, nil
	}
	return nil, bad(http.StatusUnauthorized, "invalid_api_key", "",
		"the request has no token, or one that is not known, has expired or lacks the scope call; "+
			"send Authorization: Bearer and the token")
}

// Enter authenticates a request of a route that is mounted beside the gateway's own, and counts it in the
// limits of its token. A POST is refused while the token's budget of GPU time is spent. leave must be called when the
// request has ended, error or not. AnswerError tells the client.
func (g *Gateway) Enter(r *http.Request) (c Requester, leave func(), err error) {
	return g.enter(r, r.Method == http.MethodPost)
}

// EnterWithoutWork is Enter for requests that create no work, as those that cancel some: a budget that is spent does
// not refuse them.
func (g *Gateway) EnterWithoutWork(r *http.Request) (c Requester, leave func(), err error) {
	return g.enter(r, false)
}

func (g *Gateway) enter(r *http.Request, work bool) (c Requester, leave func(), err error) {
	leave = func() {}
	who, err := g.admitted(r)
	if who == nil || err != nil {
		return Requester{}, leave, err
	}
	if refused := who.Budget.refuse(time.Now()); refused != nil && work {
		return Requester{}, leave, refused
	}
	if refused := who.begin(time.Now()); refused != nil {
		return Requester{}, leave, refused
	}
	who.dispatched()
	flow := who.Name
	if len(who.Flows) > 0 {
		flow = who.Flows[0]
	}
	return Requester{Name: who.Name, Flow: flow, caller: who}, who.leave, nil
}

// EnterAs counts a request in the limits of the client that a token of that name belongs to, where something else than
// the token lets it in: an address with a key of its own. It is refused once the client has no valid token that may use
// the model. leave must be called when the request has ended, error or not.
func (g *Gateway) EnterAs(token, model string) (leave func(), err error) {
	leave = func() {}
	c, err := g.callerFor(token, model)
	if c == nil || err != nil {
		return leave, err
	}
	if refused := c.begin(time.Now()); refused != nil {
		return leave, refused
	}
	c.dispatched()
	return c.leave, nil
}

// StaysAs returns the refusal of a request that EnterAs let in, once its client has no valid token that may use the
// model; nil: it may go on. A long request asks before each part of its answer.
func (g *Gateway) StaysAs(token, model string) error {
	_, err := g.callerFor(token, model)
	return err
}

// callerFor returns a valid token of a name that may use the model; nil without an error: none is needed.
func (g *Gateway) callerFor(token, model string) (*caller, error) {
	if g.config.Open || token == "" {
		return nil, nil //nolint:nilnil // as said
	}
	for _, c := range g.tokens.named(token) {
		if c.mayUse(model) {
			return c, nil
		}
	}
	return nil, bad(http.StatusForbidden, "permission_denied", "",
		"the client has no token that may read this any more")
}

// Offer is a model that a client may use.
type Offer struct {
	Model    string // its name, also where an adapter was asked for
	Asked    string // the name that was asked for: the model's own, or that of an adapter
	Queue    string // of its durable entries
	Protocol worker.Protocol
	Version  string
}

// Offered returns the model of a name. ok is false where there is none, or none for this client.
func (g *Gateway) Offered(c Requester, name string) (o Offer, ok bool) {
	r := g.models.route(name)
	if r == nil || (c.caller != nil && !c.caller.mayUse(r.model.Name)) {
		return Offer{}, false
	}
	m := r.model
	return Offer{Model: m.Name, Asked: name, Queue: m.Queue, Protocol: m.Protocol, Version: m.Version}, true
}

// OfferedTo returns the model of a name, for the client that a token of that name belongs to, as
// work that goes on after its request needs it.
func (g *Gateway) OfferedTo(token, name string) (o Offer, ok bool) {
	if g.config.Open {
		return g.Offered(Requester{}, name)
	}
	for _, c := range g.tokens.named(token) {
		if o, ok = g.Offered(Requester{caller: c}, name); ok {
			return o, true
		}
	}
	return Offer{}, false
}

// ReadBody reads the whole body of a request of a mounted route, of up to most bytes, as those of the gateway's own
// routes are: within the budget of the bodies of all requests, and within a minute. release must be called when the
// request has ended, error or not; the body is not valid behind it. An error is one for AnswerError.
func (g *Gateway) ReadBody(r *http.Request, most int64) (body []byte, release func(), err error) {
	held, err := g.readBody(r, most)
	if held == nil {
		return nil, func() {}, err
	}
	return held.bytes(), held.letGo, err
}

// Mount adds a route beside the gateway's own. It must be called before the gateway serves. A body must arrive within a
// minute, however it is read, unless the handler sets a read deadline of its own; the rest of one that the handler has
// not read when it answers is read for a second at most.
func (g *Gateway) Mount(pattern string, handler http.HandlerFunc) { g.mux.HandleFunc(pattern, handler) }

// BadRequest returns an error that AnswerError answers with the status and code, in OpenAI's form. param names
// the field at fault; it may be empty.
func BadRequest(status int, code, param, format string, args ...any) error {
	return bad(status, code, param, format, args...)
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

// AnswerError writes an error as OpenAI's clients expect it, and returns the status.
func AnswerError(w http.ResponseWriter, err error) int {
	return answerError(w, err, http.StatusTooManyRequests)
}

// ErrorOf returns status and message of an error, for answers in another form.
func ErrorOf(err error) (status int, message string) {
	return statusOf(err, http.StatusTooManyRequests)
}
