package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// API answers requests. It is an http.Handler.
type API struct {
	cfg Config
	db  postgres.DB
	mux *http.ServeMux

	queues sync.Map // from name to *invalidation.Queue
}

// New returns the whole API on a database.
func New(db postgres.DB, cfg Config) *API {
	a := &API{cfg: cfg.withDefaults(), db: db}
	a.cfg.Checks = append([]Check{{Name: "database", Run: a.writable}}, a.cfg.Checks...)
	a.mux = a.handler(append(a.routes(), a.probes()...))
	return a
}

// NewProbes returns the part of the API that every daemon has: /livez, /readyz and /metrics.
func NewProbes(cfg Config) *API {
	a := &API{cfg: cfg.withDefaults()}
	a.mux = a.handler(a.probes())
	return a
}

// route is a pattern of http.ServeMux and what answers it. An error becomes a problem document.
type route struct {
	method, path string
	answer       func(w http.ResponseWriter, r *http.Request) error
}

func (a *API) routes() []route {
	return []route{
		{"POST", "/v1/queues/{queue}/entries", a.push},
		{"GET", "/v1/entries/{id}", a.entry},
	}
}

func (a *API) probes() []route {
	return []route{
		{"GET", "/livez", a.livez},
		{"GET", "/readyz", a.readyz},
		{"GET", "/metrics", a.metrics},
	}
}

// ServeHTTP answers a request within the configured time and size.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), a.cfg.Timeout)
	defer cancel()
	r.Body = http.MaxBytesReader(w, r.Body, a.cfg.BodyBytesMax)
	a.mux.ServeHTTP(w, r.WithContext(ctx))
}

var (
	errNoRoute  = errors.New("there is nothing at this address")
	errNoMethod = errors.New("this address does not take this method")
)

// handler registers the routes, and for each path an answer to the methods that it does not take.
func (a *API) handler(routes []route) *http.ServeMux {
	mux := http.NewServeMux()
	methods := map[string][]string{}
	for _, r := range routes {
		mux.HandleFunc(r.method+" "+r.path, a.reporting(r.method+" "+r.path, r.answer))
		methods[r.path] = append(methods[r.path], r.method)
	}
	for path, allowed := range methods {
		slices.Sort(allowed)
		mux.HandleFunc(path, a.reporting("other", func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Allow", strings.Join(allowed, ", "))
			return errNoMethod
		}))
	}
	mux.HandleFunc("/", a.reporting("other", func(http.ResponseWriter, *http.Request) error { return errNoRoute }))
	return mux
}

// reporting turns errors into problem documents and tells cfg.Observe how it went.
func (a *API) reporting(name string, answer func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		noted := &noting{ResponseWriter: w, status: http.StatusOK}
		if err := answer(noted, r); err != nil {
			a.report(noted, r, err)
		}
		a.cfg.Observe(name, noted.status, time.Since(start))
	}
}

// noting remembers the status of the answer.
type noting struct {
	http.ResponseWriter
	status int
}

func (n *noting) WriteHeader(status int) {
	n.status = status
	n.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (n *noting) Unwrap() http.ResponseWriter { return n.ResponseWriter }
