package main

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/tasknode"
)

// observer turns what the node does into metrics. It is a tasknode.Observer.
type observer struct {
	metrics   telemetry.Metrics
	queues    telemetry.Bound
	models    telemetry.Bound
	byQueue   sync.Map // from label to *ofQueue
	wait, run *prometheus.HistogramVec
	claim     *prometheus.HistogramVec
	errors    *prometheus.CounterVec
	claimed   *prometheus.CounterVec
	mu        sync.Mutex
	refusals  map[refusal]float64
}

type refusal struct{ queue, reason string }

// webhookQueue is the queue of callbacks.
const webhookQueue = "webhook"

func newObserver() *observer {
	m := telemetry.NewMetrics()
	o := &observer{
		metrics: m,
		wait: m.Histogram("node_wait_seconds", .001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300,
			600, 1800, 3600, 14400, 86400),
		run:      m.Histogram("node_run_seconds", .001, .01, .1, .5, 1, 5, 30, 120, 600, 3600, 14400, 86400),
		claim:    m.Histogram("node_claim_seconds", .0005, .001, .0025, .005, .01, .025, .1, .5, 2),
		errors:   m.Counter("node_run_errors_total"),
		claimed:  m.Counter("node_claimed_total"),
		refusals: map[refusal]float64{},
	}
	o.queues.Label(webhookQueue) // an alert names it: it is not among the rest, however many queues the node serves
	return o
}

// ofQueue is what is counted under the label of a queue, looked up once.
type ofQueue struct {
	wait, run       prometheus.Observer
	errors, claimed prometheus.Counter
}

func (o *observer) of(queue string) *ofQueue {
	if known, found := o.byQueue.Load(queue); found {
		return known.(*ofQueue) //nolint:errcheck // nothing else is stored
	}
	label := o.queues.Label(queue)
	if known, found := o.byQueue.Load(label); found { // of the rest, whose names are not remembered
		return known.(*ofQueue) //nolint:errcheck // nothing else is stored
	}
	made := &ofQueue{
		wait: o.wait.WithLabelValues(label), run: o.run.WithLabelValues(label),
		errors: o.errors.WithLabelValues(label), claimed: o.claimed.WithLabelValues(label),
	}
	o.byQueue.Store(label, made)
	return made
}

// Claimed implements tasknode.Observer.
func (o *observer) Claimed(queue string, locks int, took time.Duration, limited bool) {
	o.claim.WithLabelValues().Observe(took.Seconds())
	if locks > 0 {
		o.of(queue).claimed.Add(float64(locks))
	}
	if limited {
		o.Refused(queue, "limit")
	}
}

// Refused implements tasknode.Observer.
func (o *observer) Refused(queue, reason string) {
	queue = o.queues.Label(queue)
	o.mu.Lock()
	o.refusals[refusal{queue, reason}]++
	o.mu.Unlock()
}

// Ran implements tasknode.Observer.
func (o *observer) Ran(queue string, waited, ran time.Duration, err error) {
	q := o.of(queue)
	q.wait.Observe(waited.Seconds())
	q.run.Observe(ran.Seconds())
	if err != nil {
		q.errors.Inc()
	}
}

// slots is the slot pool as a gate whose refusals are counted.
type slots struct {
	tasknode.Gate
	*observer
}

// Take implements tasknode.Gate.
func (s slots) Take(queue string, want int) (int, func(n int)) {
	allow, release := s.Gate.Take(queue, want)
	if allow == 0 {
		s.Refused(queue, "slots")
	}
	return allow, release
}

// registry holds all that /metrics shows; telemetry.Catalog explains it.
func (n *node) registry() *prometheus.Registry {
	o := n.observer
	return telemetry.NewRegistry(
		o.wait, o.run, o.claim, o.errors, o.claimed,
		telemetry.Collector(n.refusalMetrics), telemetry.Collector(n.nodeMetrics), telemetry.Collector(n.modelMetrics),
	)
}

func (n *node) refusalMetrics(out chan<- prometheus.Metric) {
	o := n.observer
	sums := o.metrics.Sums()
	o.mu.Lock()
	for r, count := range o.refusals {
		sums.Add("node_refusals_total", count, r.queue, r.reason)
	}
	o.mu.Unlock()
	sums.Collect(out)
}

func (n *node) modelMetrics(out chan<- prometheus.Metric) {
	sums := n.observer.metrics.Sums()
	for name, t := range n.inference.Pool.Tallies() {
		model := n.observer.models.Label(name)
		sums.Add("node_model_calls_total", float64(t.Calls), model)
		sums.Add("node_model_entries_total", float64(t.Entries), model)
		sums.Add("node_model_swaps_total", float64(t.Swaps), model)
		sums.Add("node_model_slots", float64(t.Busy), model, "busy")
		sums.Add("node_model_slots", float64(t.Held-t.Busy), model, "idle")
	}
	sums.Collect(out)
}

func (n *node) nodeMetrics(out chan<- prometheus.Metric) {
	s, value := n.task.Stats(), n.observer.metrics.Value
	out <- value("node_settles_total", float64(s.Settles.Load()))
	out <- value("node_settle_seconds_total", time.Duration(s.SettleTime.Load()).Seconds())
	out <- value("node_settled_total", float64(s.Settled.Load()))
	out <- value("node_settle_refused_total", float64(s.Refused.Load()))
	out <- value("node_settle_repeated_total", float64(s.Repeated.Load()))
	out <- value("node_endings_unrecorded_total", float64(s.Unrecorded.Load()))
	out <- value("node_leases_lost_total", float64(s.LeasesLost.Load()))
	out <- value("node_threads", float64(n.task.Threads()))
	out <- value("node_locks", float64(n.task.Held()))
	for duty, count := range n.errors.Counts() {
		out <- value("duty_errors_total", float64(count), duty)
	}
	n.observer.metrics.Pool(out, "claims", n.claims)
	n.observer.metrics.Pool(out, "heartbeat", n.beats)
	if n.listener == nil {
		return
	}
	hints := n.listener.Status()
	out <- value("hints_connected", telemetry.OneIf(hints.Connected))
	out <- value("hints_heard_total", float64(hints.Heard))
	out <- value("hints_reconnects_total", float64(hints.Reconnects))
	out <- value("hints_round_trip_seconds", hints.RoundTrip.Seconds())
}
