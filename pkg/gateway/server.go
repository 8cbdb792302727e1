package gateway

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// routes are all that clients can ask for.
func (g *Gateway) routes() *http.ServeMux {
	mux := http.NewServeMux()
	for _, o := range operations {
		read := readJSON
		if o.form {
			read = readForm
		}
		mux.HandleFunc("POST /v1/"+o.path, g.serve(read))
	}
	mux.HandleFunc("POST /models/{model}/call", g.serve(readGeneric))
	mux.HandleFunc("GET /v1/models", g.listModels)
	mux.HandleFunc("GET /v1/models/{id...}", g.oneModel)
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", g.readyz)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		AnswerError(w, bad(http.StatusNotFound, "unknown_url", "", "there is no %s %s here", r.Method, r.URL.Path))
	})
	return mux
}

func (g *Gateway) readyz(w http.ResponseWriter, r *http.Request) {
	if err := g.Ready(r.Context()); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write([]byte("ok\n"))
}

// reader reads what a request asks for from its body.
type reader func(r *http.Request, body []byte) (asked, error)

// asked is what a request asks for.
type asked struct {
	model    string
	scanned  scanned
	parts    func(remote string, addUsage bool) [][]byte
	json     bool // the body is JSON
	addUsage bool // a stream without stream_options, of an operation that takes them
}

// serve returns the handler of one operation: token, body, route, admission, exchange.
func (g *Gateway) serve(read reader) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		s := &serving{gateway: g, w: w, r: r, began: began, full: http.StatusTooManyRequests}
		s.record.ID = requestID(r)
		w.Header()["X-Request-Id"] = []string{s.record.ID}
		dropped := DropNone
		defer func() { s.finish(dropped) }() // also where an answer breaks off, which is a panic
		if err := s.run(read); err != nil {
			var refusal *Rejection
			if errors.As(err, &refusal) {
				dropped = refusal.Reason
				s.refused(refusal)
			}
			s.record.Error = err.Error()
			s.record.Status = answerError(w, err, s.full)
		}
	}
}

// requestID returns the id that the client gave, if it is fit for headers and logs, or a new one.
func requestID(r *http.Request) string {
	given := r.Header.Get("X-Request-Id")
	unfit := func(c rune) bool { return c <= ' ' || c > '~' }
	if given != "" && len(given) <= 128 && !strings.ContainsFunc(given, unfit) {
		return given
	}
	const digits = "0123456789abcdef"
	var id [20]byte
	copy(id[:], "req_")
	bits := rand.Uint64() //nolint:gosec // an id, no secret
	for i := 4; i < len(id); i++ {
		id[i] = digits[bits&15]
		bits >>= 4
	}
	return string(id[:])
}

// serving is one request from its head to its end.
type serving struct {
	gateway *Gateway
	w       http.ResponseWriter
	r       *http.Request
	began   time.Time
	full    int // status for a pool without room
	caller  *caller
	route   *route
	held    *heldBody // nil: there is none yet
	body    []byte    // nil behind letGo
	asked   asked     // its parts are nil behind letGo
	streams bool      // the answer is to come as it is made
	ticket  *Request
	record  RequestRecord
	queued  time.Duration // in all waits
	worker  time.Duration // spent in exchanges
}

func (s *serving) run(read reader) (err error) {
	s.caller, err = s.gateway.enter(s.r, true, s.began)
	if s.caller != nil {
		s.record.Token = s.caller.Name
	}
	if err != nil {
		return err
	}
	if s.caller != nil {
		defer s.caller.leave()
	}
	waiting := s.caller != nil
	defer func() {
		if waiting {
			s.caller.dispatched()
		}
	}()
	s.held, err = s.gateway.readBody(s.r, s.caller.held(), s.gateway.config.BodyMax)
	if s.held != nil {
		defer s.letGo()
	}
	if err != nil {
		return err
	}
	s.body = s.held.bytes()
	if s.asked, err = read(s.r, s.body); err != nil {
		return err
	}
	if err := s.find(); err != nil {
		return err
	}
	if err := s.readHeaders(); err != nil {
		return err
	}
	ctx, cancel := s.withDeadline()
	defer cancel()
	if done, err := s.asynchronous(ctx); done || err != nil {
		return err
	}
	if err := s.wait(ctx); err != nil {
		return s.pushInstead(ctx, err)
	}
	if waiting {
		s.caller.dispatched()
		waiting = false
	}
	return s.exchange(ctx)
}

// letGo ends the use of the body: the request may last as long as its answer. A second call changes nothing.
func (s *serving) letGo() {
	s.held.letGo()
	s.body, s.asked.parts = nil, nil
	s.asked.scanned.choices, s.asked.scanned.background = nil, nil
}

// find looks up the route of the model that was asked for.
func (s *serving) find() error {
	s.record.Model = s.asked.model
	s.route = s.gateway.models.route(s.asked.model)
	if s.route == nil || (s.caller != nil && !s.caller.mayUse(s.route.model.Name)) ||
		s.route.generic() != strings.HasPrefix(s.r.URL.Path, "/models/") {
		s.route = nil
		return unknownModel(s.asked.model)
	}
	s.full = s.route.model.Policy.RefuseStatus
	if err := s.route.model.closed(); err != nil {
		return err
	}
	return s.route.fit(s.body)
}

// unknownModel is the error of a request for a model that its caller does not have, which may be one of others.
func unknownModel(name string) error {
	return bad(http.StatusNotFound, "model_not_found", "model",
		"the model %q does not exist or you do not have access to it", name)
}

// readHeaders reads the headers that are for the gateway, and makes the ticket for the pool.
func (s *serving) readHeaders() error {
	h := s.r.Header
	flow, granted, err := s.flow(h.Get("X-Penstock-Flow"))
	if err != nil {
		return err
	}
	set := s.gateway.flow(flow)
	if err := set.closed(); err != nil {
		return err
	}
	criticality, err := s.criticality(h.Get("X-Penstock-Criticality"), set)
	if err != nil {
		return err
	}
	ttl, err := milliHeader(h, "X-Penstock-Queue-Ttl-Ms")
	if err != nil {
		return err
	}
	left, err := milliHeader(h, "X-Penstock-Deadline-Ms")
	if err != nil {
		return err
	}
	if err := s.checkBackground(); err != nil {
		return err
	}
	choices, err := s.countChoices()
	if err != nil {
		return err
	}
	s.ticket = &Request{
		ID: s.record.ID, Flow: flow, Share: s.gateway.share(flow, granted), Criticality: criticality,
		Weight: set.Weight,
		Bytes:  len(s.body), TTL: ttl,
		TokensIn: float64(len(s.body)) / bytesPerToken, TokenMax: s.asked.scanned.tokensMax, Adapter: s.route.adapter,
		Choices: choices, Held: s.caller.held(),
	}
	if s.caller != nil && s.caller.Weight > 0 && set.Weight == 0 {
		s.ticket.Weight = s.caller.Weight
	}
	if left > 0 {
		s.ticket.Deadline = s.began.Add(left)
	}
	s.affine()
	s.streams = s.asked.scanned.stream
	s.record.Flow, s.record.Criticality = flow, criticality.String()
	return nil
}

// withDeadline is the context of the request, with the deadline that its client has named.
func (s *serving) withDeadline() (context.Context, context.CancelFunc) {
	if s.ticket.Deadline.IsZero() {
		return s.r.Context(), func() {}
	}
	return context.WithDeadline(s.r.Context(), s.ticket.Deadline)
}

// bytesPerToken is a rough mean over languages and tokenizers.
const bytesPerToken = 4

// affine computes what the request should be near to.
func (s *serving) affine() {
	key := s.r.Header.Get("X-Penstock-Session")
	if key == "" {
		key = s.asked.scanned.cacheKey
	}
	if key != "" {
		s.ticket.Session = hashKey(s.ticket.Flow + "\x00" + key)
	}
	if p := s.asked.scanned.prompt; !p.empty() {
		s.ticket.Prefix = prefixHashes(s.body[p.from:p.to])
	}
}

// flow is whose request it is: the header, as far as the token allows, else the token's own. Granted is the flow of the
// token that allows it; without a token each flow is.
func (s *serving) flow(named string) (flow, granted string, err error) {
	if len(named) > 200 {
		return "", "", bad(http.StatusBadRequest, "invalid_flow", "x-penstock-flow",
			"x-penstock-flow has more than 200 bytes")
	}
	if !utf8.ValidString(named) {
		return "", "", bad(http.StatusBadRequest, "invalid_flow", "x-penstock-flow", "x-penstock-flow is not UTF-8")
	}
	if s.caller == nil {
		return named, named, nil
	}
	flows := s.caller.Flows
	if len(flows) == 0 {
		flows = []string{s.caller.Name}
	}
	if named == "" {
		return flows[0], flows[0], nil
	}
	for _, own := range flows {
		if len(own) > len(granted) && (named == own || strings.HasPrefix(named, own+"/")) {
			granted = own
		}
	}
	if granted != "" {
		return named, granted, nil
	}
	return "", "", bad(http.StatusForbidden, "flow_not_allowed", "x-penstock-flow",
		"the token may not name the flow %q", named)
}

// criticality is the header's, never above what the token and the flow's settings allow. Where neither has one, nobody
// has said that the requests go before those of others.
func (s *serving) criticality(named string, set FlowState) (Criticality, error) {
	criticality, err := ReadCriticality(strings.ToLower(strings.TrimSpace(named)))
	if err != nil {
		return criticality, bad(http.StatusBadRequest, "invalid_criticality", "x-penstock-criticality", "%s",
			err.Error())
	}
	if set.Set && named == "" {
		criticality = set.Criticality
	}
	if set.Set {
		criticality = max(criticality, set.Criticality)
	}
	if s.caller != nil && (!s.caller.CriticalityOfFlow || !set.Set) {
		criticality = max(criticality, s.caller.Criticality)
	}
	return criticality, nil
}

// milliHeader reads a header with a number of milliseconds; 0: it is absent.
func milliHeader(h http.Header, name string) (time.Duration, error) {
	text := h.Get(name)
	if text == "" {
		return 0, nil
	}
	ms, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || ms < 1 || ms > 86_400_000 {
		return 0, bad(http.StatusBadRequest, "invalid_header", strings.ToLower(name),
			"%s must be a number of milliseconds from 1 to 86400000, not %q", strings.ToLower(name), text)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// wait lets the pool admit the request. One that a pause holds by then is refused for it.
func (s *serving) wait(ctx context.Context) error {
	before := time.Now()
	err := s.route.pool.await(ctx, s.ticket)
	s.queued += time.Since(before)
	paused := s.paused()
	if paused == nil {
		return err
	}
	var refused *Rejection
	switch {
	case err == nil:
		s.route.pool.end(s.ticket, CallEnd{Unused: true})
	case errors.As(err, &refused) && refused.Reason != DropNoEndpoints:
		return err
	}
	return paused
}

// exchange makes the call, and once more on another instance where nothing can have run.
func (s *serving) exchange(ctx context.Context) error {
	g := s.gateway
	s.route.pool.retries.earn()
	c := &call{
		gateway: g, writer: s.w, request: s.r, route: s.route, path: s.r.URL.Path, held: s.held,
		release: s.letGo, id: s.record.ID, token: s.record.Token, ticket: s.ticket, queued: s.queued,
		json: s.asked.json, cut: s.asked.addUsage,
	}
	for {
		c.tries++
		c.sent.Store(false)
		c.ticket, c.body = s.ticket, s.asked.parts(s.route.remote, s.asked.addUsage)
		r := s.once(ctx, c)
		if !r.again || ctx.Err() != nil {
			return s.outcome(ctx, r)
		}
		s.ticket = s.ticket.elsewhere()
		s.ticket.Misrouted = r.end.Misrouted
		if err := s.wait(ctx); err != nil {
			return s.pushInstead(ctx, err)
		}
		c.queued = s.queued
	}
}

// once makes one attempt and ends its call in the pool, whatever happens.
func (s *serving) once(ctx context.Context, c *call) (r result) {
	before := time.Now()
	r.end = CallEnd{Failed: true, Doubt: c.mayGoOn()}
	defer func() {
		took := time.Since(before)
		s.worker += took
		r.end.Took = took
		s.endCall(r)
	}()
	s.record.Attempts++
	s.record.Server = s.ticket.server
	return c.attempt(ctx)
}

// endCall ends the call in the pool and in the book.
func (s *serving) endCall(r result) {
	if r.end.Doubt && s.gateway.leases != nil {
		// First: a slot that is held and not in the pool would be taken for a new one.
		s.gateway.leases.doubt(s.route.model.Name, s.ticket.slot.Held, "online call "+s.record.ID+" was broken off")
	}
	s.route.pool.end(s.ticket, r.end)
	s.record.Status, s.record.In, s.record.Out = r.status, r.end.TokensIn, r.end.TokensOut
	s.record.Fault = r.fault
	if charger := s.gateway.config.Charge; charger != nil && !r.end.Busy && !r.end.Unused && !r.end.Unfit {
		charger.Charge(Charge{
			Model: s.route.model.Name, Queue: s.route.model.Queue, Flow: s.ticket.Flow, Took: r.end.Took,
			GPU: time.Duration(float64(r.end.Took) * s.ticket.units), Wasted: r.end.Failed,
			TokensIn: r.end.TokensIn, TokensOut: r.end.TokensOut,
			Separate: s.route.model.Policy.FairScope == FairSeparate,
		})
	}
}

// refused counts a request that found no room, as demand.
func (s *serving) refused(r *Rejection) {
	if charger := s.gateway.config.Charge; charger != nil && r.noRoom && s.route != nil {
		charger.Refuse(s.route.model.Name)
	}
}

// outcome is what the client still has to be told.
func (s *serving) outcome(ctx context.Context, r result) error {
	var refused *Rejection
	switch {
	case r.answered:
		if r.err != nil {
			s.record.Error = r.err.Error()
		}
		if r.halved {
			panic(http.ErrAbortHandler) // net/http closes the connection
		}
		return nil
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return &Rejection{
			Reason: DropDeadline,
			Detail: "the deadline of the request was over before the worker answered",
		}
	case s.r.Context().Err() != nil:
		return &Rejection{Reason: DropCancelled}
	case errors.As(r.err, &refused):
		return refused
	default:
		return &Rejection{Reason: DropUpstream, Detail: worded(r.err)}
	}
}

// elsewhere returns a fresh request for a second attempt, which avoids the instance of the first, and waits for as long
// as that has left.
func (r *Request) elsewhere() *Request {
	again := *r
	again.inPool, again.Leave = inPool{}, nil
	again.TTL = max(r.left, 1) // 0 would be the pool's
	again.Avoid = append(r.Avoid, r.slot.Instance)
	return &again
}

// own adds the gateway's headers to an answer.
func (g *Gateway) own(header http.Header, c *call) {
	values := []string{c.id, strconv.FormatInt(c.queued.Milliseconds(), 10), strconv.Itoa(c.tries)} // one allocation
	header["X-Request-Id"], header["X-Penstock-Queue-Ms"] = values[0:1:1], values[1:2:2]
	header["X-Penstock-Attempts"] = values[2:3:3]
}

// finish records how the request ended.
func (s *serving) finish(dropped Dropped) {
	now := time.Now()
	took := now.Sub(s.began)
	e := &s.record
	e.EndedAt, e.TookMS, e.QueueMS = now, milliseconds(took), milliseconds(s.queued)
	if s.ticket != nil {
		e.Trace = s.ticket.trace
	}
	s.gateway.ring.add(*e)
	if o := s.gateway.config.Observer; o != nil {
		o.Ended(*e, dropped, took-s.queued-s.worker)
	}
}
