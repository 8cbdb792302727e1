package prediction

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Config of Predictions. The zero value works.
type Config struct {
	Base    string // address of the gateway as clients reach it; empty: that of each request, and none in webhooks
	BodyMax int64  // bytes of a request: 32 MiB
	// Secret returns the secret that signs webhooks for a client; nil: clients cannot read it here.
	Secret func(ctx context.Context, owner string) (string, error)
	// CheckWebhook returns why the address of a webhook is refused; nil: any host may be named.
	CheckWebhook func(address string) error
	Hint         func(queue int32) // tells nodes that an entry was committed; nil: they poll
	Log          *slog.Logger
}

// Predictions serves the routes of predictions.
type Predictions struct {
	config  Config
	db      postgres.DB
	gateway *gateway.Gateway
	log     *slog.Logger
	watch   *invalidation.EntryWatch // of entries whose ends requests wait for
	beat    beat
	owed    bell              // rung when a prediction with a webhook was made
	swept   postgres.PageWalk // of the table of predictions; of notices alone

	notifying duty.FailingEach // by prediction
}

// New returns the predictions on a database, for the models and tokens of a gateway.
func New(config Config, g *gateway.Gateway, db postgres.DB) *Predictions {
	config.BodyMax = cmp.Or(config.BodyMax, 32<<20)
	log := cmp.Or(config.Log, slog.Default())
	return &Predictions{config: config, db: db, gateway: g, log: log, watch: invalidation.NewEntryWatch(db, 0, log)}
}

// Mount adds the routes to the gateway.
func (s *Predictions) Mount() {
	s.route("POST /v1/predictions", s.createVersion)
	s.route("POST /v1/models/{owner}/{name}/predictions", s.createModel)
	s.route("POST /v1/deployments/{owner}/{name}/predictions", s.createModel)
	s.route("GET /v1/predictions", s.list)
	s.route("GET /v1/predictions/{id}", s.get)
	s.gateway.MountFor("POST /v1/predictions/{id}/cancel", s.gateway.AdmitWithoutWork, s.cancel, s.refuse)
	s.route("GET /v1/webhooks/default/secret", s.secret)
	s.gateway.Mount("GET /v1/predictions/{id}/stream/{key}", s.stream)
}

func (s *Predictions) route(pattern string, serve gateway.Route) {
	s.gateway.MountFor(pattern, s.gateway.Admit, serve, s.refuse)
}

// problem is an error as RFC 9457 has it.
type problem struct {
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
}

// refuse answers with what went wrong.
func (s *Predictions) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, detail := gateway.ErrorOf(err)
	gateway.SetRetryAfter(w, err)
	switch {
	case errors.Is(err, errPlace):
		status, detail = http.StatusBadRequest, err.Error()
	case errors.Is(err, errNone):
		status, detail = http.StatusNotFound, "there is no prediction "+strconv.Quote(r.PathValue("id"))
	case errors.Is(err, invalidation.ErrPayloadTooLarge), errors.Is(err, invalidation.ErrInvalid):
		status = http.StatusUnprocessableEntity
	case status != http.StatusInternalServerError:
	case r.Context().Err() != nil:
		status, detail = gateway.ErrorOf(&gateway.Rejection{Reason: gateway.DropCancelled})
	case postgres.BadText(err):
		status, detail = http.StatusUnprocessableEntity, "a text of the request is not UTF-8, or has NUL"
	case postgres.Unavailable(err):
		s.warn(r, err)
		status, detail = http.StatusServiceUnavailable, "predictions are not available now: send the request again"
	default:
		s.warn(r, err)
		detail = "the request failed"
	}
	w.Header().Set("Content-Type", "application/problem+json")
	gateway.AnswerJSON(w, r, status, problem{http.StatusText(status), status, detail})
}

// warn logs an error of a request by its route and prediction. The path of a stream has a key in it.
func (s *Predictions) warn(r *http.Request, err error) {
	s.log.Warn("predictions", "route", r.Pattern, "prediction", r.PathValue("id"), "error", err)
}

func invalid(param, format string, args ...any) error {
	return gateway.BadRequest(http.StatusUnprocessableEntity, "invalid", param, format, args...)
}

// creation is the body of a new prediction.
type creation struct {
	Version string          `json:"version"`
	Model   string          `json:"model"`
	Input   json.RawMessage `json:"input"`
	Webhook string          `json:"webhook"`
	Events  []string        `json:"webhook_events_filter"`
	Stream  bool            `json:"stream"`
}

func (s *Predictions) createVersion(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	return s.create(w, r, c, "")
}

func (s *Predictions) createModel(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	return s.create(w, r, c, r.PathValue("owner")+"/"+r.PathValue("name"))
}

func (s *Predictions) create(w http.ResponseWriter, r *http.Request, c gateway.Requester, model string) error {
	body, release, err := s.gateway.ReadBody(r, c, s.config.BodyMax)
	defer release()
	if err != nil {
		return err
	}
	var ask creation
	if err := json.Unmarshal(body, &ask); err != nil {
		return invalid("", "the body is not a prediction: %s", err)
	}
	wait, err := waitOf(r.Header)
	if err != nil {
		return err
	}
	o, err := s.order(c, ask, cmp.Or(model, ask.Version, ask.Model), r.Header)
	if err != nil {
		return err
	}
	if err := c.PushOne(); err != nil {
		return err
	}
	o.base = s.base(r)
	id, queue, err := insert(r.Context(), s.db, o)
	if err != nil {
		return err
	}
	if s.config.Hint != nil {
		s.config.Hint(queue)
	}
	if o.Webhook != "" {
		s.owed.ring()
	}
	p, err := find(r.Context(), s.db, c.Name, id)
	if err != nil {
		return err
	}
	if wait > 0 {
		if p, err = s.waited(r.Context(), p, wait); err != nil {
			return err
		}
	}
	v := p.view(s.base(r))
	status := http.StatusCreated
	if !p.ended() {
		v.Status = starting // even if it runs by now: clients take every other status in this answer for the end
		if wait > 0 {
			status = http.StatusAccepted
		}
	}
	gateway.AnswerJSON(w, r, status, v)
	return nil
}

// order checks what was asked for.
func (s *Predictions) order(c gateway.Requester, ask creation, model string, h http.Header) (o order, err error) {
	offer, version, err := s.offer(c, model)
	if err != nil {
		return o, err
	}
	o = order{
		Owner: c.Name, Flow: c.Flow, Model: offer.Model, Version: version, Queue: offer.Queue, Input: ask.Input,
		Webhook: ask.Webhook, Events: ask.Events,
	}
	if len(ask.Input) == 0 || string(ask.Input) == "null" {
		o.Input = json.RawMessage("{}")
	}
	if o.Payload, err = payloadOf(o.Input, offer, ask.Stream); err != nil {
		return o, invalid("input", "%s", err)
	}
	if o.Webhook != "" {
		if err := s.checkWebhook(o.Webhook); err != nil {
			return o, err
		}
	}
	for _, e := range o.Events {
		if !slices.Contains(eventNames, e) {
			return o, invalid("webhook_events_filter", "webhook_events_filter has %q: want %s", e,
				strings.Join(eventNames, ", "))
		}
	}
	if o.Events == nil {
		o.Events = []string{}
	}
	if after := h.Get("Cancel-After"); after != "" {
		d, err := durationOf(after)
		if err != nil || d < 5*time.Second || d > 24*time.Hour {
			return o, invalid("Cancel-After", "Cancel-After is %q: want 5s to 24h", after)
		}
		o.CancelAfter = d
	}
	return o, nil
}

// durationOf reads 90s, 1m30s, or seconds.
func durationOf(text string) (time.Duration, error) {
	if _, err := strconv.Atoi(text); err == nil {
		text += "s"
	}
	return time.ParseDuration(strings.ReplaceAll(text, " ", ""))
}

// offer finds the model that a reference names: its name, or owner/name with any owner, each with a version behind
// a colon. Versions are those of the registry; "latest" is the one that is registered.
func (s *Predictions) offer(c gateway.Requester, ref string) (o gateway.Offer, version string, err error) {
	if ref == "" {
		return o, "", invalid("version", "version is missing: name the model")
	}
	if o, ok := s.gateway.Offered(c, ref); ok {
		return o, cmp.Or(o.Version, o.Model), nil
	}
	base, wanted, _ := strings.Cut(ref, ":")
	for _, name := range []string{base, path.Base(base)} {
		o, ok := s.gateway.Offered(c, name)
		if !ok {
			continue
		}
		if known := cmp.Or(o.Version, o.Model); wanted != "" && wanted != "latest" && wanted != known {
			return o, "", invalid("version", "the version of model %q is %q, not %q", o.Model, known, wanted)
		}
		return o, cmp.Or(o.Version, o.Model), nil
	}
	return o, "", gateway.BadRequest(http.StatusNotFound, "not_found", "version",
		"the model %q does not exist or you do not have access to it", ref)
}

// base is the address of the routes as the client of the request sees it.
func (s *Predictions) base(r *http.Request) string {
	if s.config.Base != "" {
		return s.config.Base
	}
	if r.TLS != nil {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

func (s *Predictions) get(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	p, err := find(r.Context(), s.db, c.Name, r.PathValue("id"))
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, p.view(s.base(r)))
	return nil
}

func (s *Predictions) cancel(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	p, err := find(r.Context(), s.db, c.Name, r.PathValue("id"))
	if err == nil {
		err = cancel(r.Context(), s.db, p)
	}
	if err == nil {
		p, err = find(r.Context(), s.db, c.Name, p.ID)
	}
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, p.view(s.base(r)))
	return nil
}

// pageMax is how many predictions are in a page.
const pageMax = 100

type listing struct {
	Previous *string `json:"previous"`
	Next     *string `json:"next"`
	Results  []view  `json:"results"`
}

func (s *Predictions) list(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	asked := r.URL.Query()
	behind := cursor{asked.Get("cursor"), asked.Get("before")}
	rows, next, err := page(r.Context(), s.db, c.Name, behind, pageMax)
	if errors.Is(err, errCursor) {
		return invalid("cursor", "%s", err)
	}
	if err != nil {
		return err
	}
	list := listing{Results: []view{}}
	for _, p := range rows {
		list.Results = append(list.Results, p.view(s.base(r)))
	}
	if next.ID != "" {
		address := s.base(r) + "/v1/predictions?" + url.Values{"cursor": {next.ID}, "before": {next.Before}}.Encode()
		list.Next = &address
	}
	gateway.AnswerJSON(w, r, http.StatusOK, list)
	return nil
}

func (s *Predictions) secret(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	if s.config.Secret == nil {
		return gateway.BadRequest(http.StatusNotImplemented, "unavailable", "",
			"this gateway does not know the key of webhook secrets: set gateway.webhook_key")
	}
	key, err := s.config.Secret(r.Context(), c.Name)
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, map[string]string{"key": key})
	return nil
}
