package api

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// API answers requests. It is an http.Handler.
type API struct {
	cfg      Config
	db       postgres.DB
	operator *operator.Database
	mux      *http.ServeMux
	handler  http.Handler // mux, with the handlers around it
	huma     huma.API
	routes   []route
	tokens   tokens

	queues    *invalidation.Handles
	bodies    bodyMemory
	streams   streamMemory
	flights   flights
	ready     readiness
	degraded  degraded
	probing   duty.FailingEach // readiness checks by their names
	refusals  refusals
	rates     rates
	budgets   gpuTimeBudgets
	watch     *invalidation.EntryWatch
	lists     *listPlaces
	examining sync.Mutex
	// draining ends when Drain is called.
	draining <-chan struct{}
	drain    func()
}

// New returns the whole API on a database. The addresses are listed here and nowhere else: a file a noun.
func New(db postgres.DB, cfg Config) *API {
	a := newAPI(cfg)
	a.db, a.operator = db, operator.New(db)
	a.tokens.find, a.tokens.lookups = a.operator.FindToken, make(chan struct{}, lookupsMax)
	a.queues = invalidation.NewHandles(db, a.cfg.Hinter)
	a.watch = invalidation.NewEntryWatch(db, a.cfg.WaitersMax, a.cfg.Log)
	a.cfg.Checks = append([]Check{{Name: "database", Run: a.writable}}, a.cfg.Checks...)
	a.probes()
	a.queueRoutes()
	a.entryRoutes()
	a.pushRoutes()
	a.jobRoutes()
	a.callbackRoute()
	a.groupRoutes()
	a.blockedKeyRoutes()
	a.failureRoutes()
	a.lockRoutes()
	a.nodeRoutes()
	a.cronRoutes()
	a.batchRoutes()
	a.modelRoutes()
	a.instanceRoutes()
	a.slotRoutes()
	a.scaleRoutes()
	a.scaleRecordRoutes()
	a.scaleTemplateRoutes()
	a.scaleCompatRoutes()
	a.limitRoutes()
	a.gatewayRoutes()
	a.pauseRoutes()
	a.operationRoutes()
	a.auditRoutes()
	a.tokenRoutes()
	a.webhookRoutes()
	a.doctorRoutes()
	a.openAPIRoutes()
	a.indexRoute()
	a.finish()
	return a
}

// NewProbes returns the part of the API that every daemon has: /livez, /readyz and, if there are any,
// /metrics and reports.
func NewProbes(cfg Config) *API {
	a := newAPI(cfg)
	a.probes()
	if cfg.Reports != nil {
		a.callbackRoute()
	}
	a.finish()
	return a
}

func newAPI(cfg Config) *API {
	a := &API{cfg: cfg.withDefaults(), mux: http.NewServeMux(), lists: newListPlaces()}
	// Apart, so that slow streams keep no short push out.
	a.bodies, a.streams = newBodyMemory(a.cfg.BodiesBytesMax/2), newStreamMemory(a.cfg.BodiesBytesMax/2)
	draining, drain := context.WithCancel(context.Background())
	a.draining, a.drain = draining.Done(), drain
	config := huma.DefaultConfig("Penstock", "v1")
	config.Info.Description = "A durable task queue on Postgres. Errors are problem documents (RFC 9457) whose " +
		"`code` is stable."
	config.OpenAPIPath, config.DocsPath, config.SchemasPath = "", "", "" // openapi.go serves the document
	config.CreateHooks = nil                                             // no $schema in answers
	config.RejectUnknownQueryParameters = true
	config.Transformers = []huma.Transformer{problemDocument}
	config.Servers = []*huma.Server{{URL: "/", Description: "The leader that serves this description"}}
	config.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer"}}
	config.Components.Headers = problemHeaders
	a.huma = humago.New(a.mux, config)
	a.huma.UseMiddleware(a.guard)
	a.handler = a.mux
	if a.cfg.Open {
		a.handler = a.localOnly(a.sameOrigin(a.mux))
	}
	return a
}

// ServeHTTP answers a request and tells Config.Observe how it went.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	w.Header().Set("X-Content-Type-Options", "nosniff")
	recorder := httpserver.NewStatusWriter(w)
	a.handler.ServeHTTP(recorder, r)
	route := r.Pattern // set by the mux
	if !strings.Contains(route, " ") {
		route = "other"
	}
	took := time.Since(start)
	if strings.Contains(r.URL.RawQuery, "wait=") || recorder.Header().Get("Content-Type") == "text/event-stream" {
		took = 0
	}
	a.cfg.Observe(route, recorder.Status, took)
}

var errElsewhere = errors.New("without a token, requests are for this machine: address it as localhost, and from no " +
	"web page of another site")

// localOnly refuses requests for another host. Without tokens, the address alone keeps strangers out; a page on the web
// whose name was made to point at this machine must not get in through a browser here.
func (a *API) localOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = strings.Trim(r.Host, "[]")
		}
		if address, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !address.IsLoopback()) {
			a.report(w, r, errElsewhere)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// sameOrigin refuses requests that a browser sends for a page of another origin. Those of the methods that
// http.CrossOriginProtection calls safe are refused as well: GET /models/scale changes something.
func (a *API) sameOrigin(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asChange := r.WithContext(r.Context())
		asChange.Method = http.MethodPost
		if err := protection.Check(asChange); err != nil {
			a.report(w, r, errElsewhere)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Admitted returns a handler that is served beside the API: without tokens it refuses requests for another host, as the
// API does, and Config.Observe counts its requests together under the route "dashboard".
func (a *API) Admitted(next http.Handler) http.Handler {
	if a.cfg.Open {
		next = a.localOnly(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		recorder := httpserver.NewStatusWriter(w)
		next.ServeHTTP(recorder, r)
		if recorder.Header().Get("Content-Type") != "text/event-stream" { // which lasts as long as its reader
			a.cfg.Observe("dashboard", recorder.Status, time.Since(start))
		}
	})
}
