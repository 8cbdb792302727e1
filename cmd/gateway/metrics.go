package main

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/gateway"
)

// observer turns what the gateway does into metrics. It is a gateway.RequestObserver.
type observer struct {
	metrics            telemetry.Metrics
	models             telemetry.Bound
	latency, took, own *prometheus.HistogramVec
	requests, answers  *prometheus.CounterVec
	faults             *prometheus.CounterVec
}

func newObserver() *observer {
	m := telemetry.NewMetrics()
	return &observer{
		metrics: m,
		latency: m.Histogram("gateway_queue_latency_seconds", .0001, .001, .005, .01, .05, .1, .5, 1, 5,
			10, 30, 60, 300),
		took: m.Histogram("gateway_request_seconds", .001, .005, .01, .05, .1, .5, 1, 5, 10, 30, 60, 120, 300, 600,
			1800),
		own:      m.Histogram("gateway_own_seconds", .00002, .00004, .00006, .0001, .00025, .0005, .001, .005, .05),
		requests: m.Counter("gateway_requests_total"),
		answers:  m.Counter("gateway_api_requests_total"),
		faults:   m.Counter("gateway_worker_faults_total"),
	}
}

// Ended implements gateway.RequestObserver.
func (o *observer) Ended(e gateway.RequestRecord, dropped gateway.Dropped, own time.Duration) {
	model := ""
	if e.Criticality != "" { // it asked for a model that there is
		model = o.models.Label(e.Model)
		o.latency.WithLabelValues(model, e.Criticality,
			strconv.FormatBool(dropped == gateway.DropNone)).Observe(e.QueueMS / 1000)
		o.took.WithLabelValues(model).Observe(e.TookMS / 1000)
	}
	o.own.WithLabelValues().Observe(max(own, 0).Seconds())
	o.requests.WithLabelValues(model, strconv.Itoa(e.Status)).Inc()
	if e.Fault != "" {
		o.faults.WithLabelValues(model, e.Fault).Inc()
	}
}

// Answered implements gateway.RequestObserver.
func (o *observer) Answered(route string, status int) {
	o.answers.WithLabelValues(route, strconv.Itoa(status)).Inc()
}

// registryOf holds all that /metrics shows; telemetry.Catalog explains it.
func (s *server) registryOf() *prometheus.Registry {
	o := s.observer
	return telemetry.NewRegistry(
		o.latency, o.took, o.own, o.requests, o.answers, o.faults,
		telemetry.Collector(s.poolMetrics), telemetry.Collector(s.leaseMetrics),
	)
}

// refusedAtOnce are the reasons for which a request is refused without a wait.
var refusedAtOnce = []gateway.Dropped{
	gateway.DropFlowFull, gateway.DropOverloaded, gateway.DropNoEndpoints,
	gateway.DropShutdown,
}

func (s *server) poolMetrics(out chan<- prometheus.Metric) {
	sums := s.observer.metrics.Sums()
	registered, former := s.gateway.AllStates()
	for _, p := range registered {
		model := s.observer.models.Label(p.Model)
		for criticality, n := range p.Waiting {
			sums.Add("gateway_queue_length", float64(n), model, criticality)
		}
		sums.Add("gateway_stock_level", float64(p.InFlight), model)
		sums.Add("gateway_ceiling", float64(p.Ceiling), model)
		sums.Add("gateway_mode", 1, model, p.Mode)
		sums.Add("gateway_upper_bound", p.Upper, model)
		sums.Add("gateway_lower_bound", p.Lower, model)
		sums.Add("gateway_active_flows", float64(p.Flows), model)
		sums.Add("gateway_bytes_waiting", float64(p.Bytes), model)
		sums.Add("gateway_slots", float64(p.Held-p.Idle), model, "busy")
		sums.Add("gateway_slots", float64(p.Idle), model, "idle")
	}
	for _, p := range slices.Concat(registered, former) {
		model, counts := s.observer.models.Label(p.Model), p.Counters()
		for c := range gateway.Criticality(len(p.Waiting)) { //nolint:gosec // three
			criticality := c.String()
			sums.Add("gateway_bypass_total", float64(counts.Bypassed[c]), model, criticality)
			sums.Add("gateway_queued_total", float64(counts.Queued[c]), model, criticality)
			sums.Add("gateway_dispatched_total", float64(counts.Dispatched[c]), model, criticality)
			sums.Add("gateway_requests_evicted_total", float64(counts.Evicted[c]), model, criticality)
		}
		sums.Add("gateway_requests_expired_total", float64(counts.Expired), model)
		sums.Add("gateway_requests_cancelled_total", float64(p.Dropped[gateway.DropCancelled]), model)
		for _, reason := range refusedAtOnce {
			sums.Add("gateway_queue_push_errors_total", float64(p.Dropped[reason]), model, string(reason))
		}
	}
	sums.Collect(out)
}

func (s *server) leaseMetrics(out chan<- prometheus.Metric) {
	var f gateway.LeaseFigures
	if s.leases != nil {
		f = s.leases.Figures()
	}
	value := s.observer.metrics.Value
	out <- value("gateway_leases_total", float64(f.Leases))
	out <- value("gateway_slots_granted_total", float64(f.Granted))
	out <- value("gateway_slots_returned_total", float64(f.Returned))
	out <- value("gateway_slots_lost_total", float64(f.Lost))
	out <- value("gateway_preemptions_total", float64(f.Preempted))
	out <- value("gateway_degraded", telemetry.OneIf(f.Degraded))
	out <- value("gateway_database_silent_seconds", f.Silent.Seconds())
	for duty, n := range s.errors.Counts() {
		out <- value("duty_errors_total", float64(n), duty)
	}
}

// statusAnswer is what /status shows.
type statusAnswer struct {
	Name     string              `json:"name"`
	Listen   string              `json:"listen"`
	Degraded bool                `json:"degraded"`
	Silent   float64             `json:"database_silent_seconds"`
	Pools    []gateway.PoolState `json:"pools"`
}

// debug is the handler of the address for operators.
func (s *server) debug() http.Handler {
	metrics := promhttp.HandlerFor(s.registryOf(), promhttp.HandlerOpts{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		a := statusAnswer{Name: s.cfg.Gateway.Name, Listen: s.listens, Pools: s.gateway.States()}
		if s.leases != nil {
			f := s.leases.Figures()
			a.Degraded, a.Silent = f.Degraded, f.Silent.Seconds()
		}
		answer(w, a)
	})
	mux.HandleFunc("GET /explain/{request}", func(w http.ResponseWriter, r *http.Request) {
		e, known := s.gateway.Explain(r.PathValue("request"))
		if !known {
			http.Error(w, "the request is not among the last that this gateway remembers", http.StatusNotFound)
			return
		}
		answer(w, e)
	})
	mux.Handle("GET /livez", s.gateway)
	mux.Handle("GET /readyz", s.gateway)
	return httpserver.ForOperators(mux, metrics, config.Loopback(s.cfg.Gateway.Debug))
}

func answer(w http.ResponseWriter, body any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the operator may be gone
}
