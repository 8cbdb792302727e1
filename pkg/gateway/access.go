package gateway

import (
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// Requester is the sender of a request, by its token. The zero value is that of an open gateway.
type Requester struct {
	Name   string // of the token
	Flow   string // of the entries that it pushes
	caller *caller
}

// authenticate returns the caller of a request; nil in an open gateway.
func (g *Gateway) authenticate(r *http.Request) (*caller, error) {
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

// enter lets a request in by its token, which counts it in its limits until leave. One that creates work is refused
// while the budget of the token is spent. The caller is nil in an open gateway, and known of a request that is refused
// for a budget or a limit.
func (g *Gateway) enter(r *http.Request, work bool, now time.Time) (*caller, error) {
	c, err := g.authenticate(r)
	if c == nil || err != nil {
		return nil, err
	}
	if work {
		if refused := c.Budget.refuse(now); refused != nil {
			return c, refused
		}
	}
	if refused := c.begin(now); refused != nil {
		return c, refused
	}
	return c, nil
}

// Admit authenticates a request of a route that is mounted beside the gateway's own, and counts it in the
// limits of its token. A POST is refused while the token's budget of GPU time is spent. leave must be called when the
// request has ended, error or not. AnswerError tells the client.
func (g *Gateway) Admit(r *http.Request) (c Requester, leave func(), err error) {
	return g.admit(r, r.Method == http.MethodPost)
}

// AdmitWithoutWork is Admit for requests that create no work, as those that cancel some: a budget that is spent does
// not refuse them.
func (g *Gateway) AdmitWithoutWork(r *http.Request) (c Requester, leave func(), err error) {
	return g.admit(r, false)
}

func (g *Gateway) admit(r *http.Request, work bool) (c Requester, leave func(), err error) {
	leave = func() {}
	who, err := g.enter(r, work, time.Now())
	if who == nil || err != nil {
		return Requester{}, leave, err
	}
	who.dispatched()
	flow := who.Name
	if len(who.Flows) > 0 {
		flow = who.Flows[0]
	}
	return Requester{Name: who.Name, Flow: flow, caller: who}, who.leave, nil
}

// AdmitAs counts a request in the limits of the client that a token of that name belongs to, where something else than
// the token lets it in: an address with a key of its own. It is refused once the client has no valid token that may use
// the model. leave must be called when the request has ended, error or not.
func (g *Gateway) AdmitAs(token, model string) (leave func(), err error) {
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

// StillAdmitted returns the refusal of a request that AdmitAs admitted, once its client has no valid token that may use
// the model; nil: it may go on. A long request asks before each part of its answer.
func (g *Gateway) StillAdmitted(token, model string) error {
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
