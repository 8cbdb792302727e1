package main

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/maintenance"
	"github.com/penstock/penstock/pkg/recovery"
	"github.com/penstock/penstock/pkg/scale"
)

// registry holds the metrics of /metrics; see telemetry.Catalog. Counters of duties restart with
// each term.
func (l *leader) registry() *prometheus.Registry {
	return telemetry.NewRegistry(
		l.requests.total, l.requests.seconds,
		telemetry.Collector(l.queueMetrics), telemetry.Collector(l.serverMetrics),
		telemetry.Collector(l.electionMetrics),
		telemetry.Collector(l.hintMetrics), telemetry.Collector(l.dutyMetrics), telemetry.Collector(l.poolMetrics),
		telemetry.Collector(l.scaleMetrics), telemetry.Collector(l.errorMetrics),
	)
}

// sampling is the last sample of the queues, if this process is elected: that of a former leader is
// old.
func (l *leader) sampling() (s maintenance.Sampling, known bool) {
	if d := l.duties.Load(); d != nil && l.elector.Status().Leading {
		s = d.samples.Latest()
	}
	return s, !s.At.IsZero()
}

func (l *leader) queueMetrics(out chan<- prometheus.Metric) {
	sampling, known := l.sampling()
	if !known {
		return
	}
	sums := l.metrics.Sums()
	var others []maintenance.Sample
	for _, s := range sampling.Queues {
		queue := l.queues.Label(s.Queue)
		if queue == telemetry.Other {
			others = append(others, s)
		}
		sums.Max("queue_head_age_seconds", read(s.HeadAge), queue)
		reason := ""
		if s.Blocked != nil {
			reason = *s.Blocked
		}
		sums.Add("queue_entries", float64(s.Initial), queue, "initial", "")
		sums.Add("queue_entries", float64(s.Pending-s.Computing), queue, "pending", reason)
		sums.Add("queue_entries", float64(s.Computing), queue, "computing", "")
		sums.Add("queue_entries", float64(s.Disabled), queue, "disabled", "")
		sums.Add("queue_entries", float64(s.Failed), queue, "failed", "")
		sums.Max("queue_estimated", telemetry.OneIf(s.Estimated), queue)
		sums.Add("queue_drain_per_second", read(s.OutPerSecond), queue)
		sums.Add("queue_accepted_total", float64(s.Accepted), queue)
		sums.Add("queue_gone_total", float64(s.Gone), queue)
		sums.Add("queue_serving_nodes", float64(s.Serving), queue)
		sums.Add("queue_dead_tuples", float64(s.DeadTuples), queue)
	}
	if past := l.others.past(sampling.At, others); len(others) > 0 {
		sums.Add("queue_accepted_total", float64(past.accepted), telemetry.Other)
		sums.Add("queue_gone_total", float64(past.gone), telemetry.Other)
	}
	for _, m := range sampling.Models {
		model := l.models.Label(m.Model)
		sums.Add("model_slots", float64(max(0, m.Slots-m.HeldUsable)), model, "free")
		sums.Add("model_slots", float64(m.Held-m.Doubtful), model, "held")
		sums.Add("model_slots", float64(m.Doubtful), model, "doubtful")
	}
	for _, d := range sampling.Degraded {
		sums.Max("degraded", 1, d.Code, l.degraded.Label(d.Object), strconv.FormatBool(d.Critical))
	}
	sums.Collect(out)
	out <- l.metrics.Value("sample_age_seconds", time.Since(sampling.At).Seconds())
	out <- l.metrics.Value("sample_seconds", sampling.Took.Seconds())
}

func read(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}

func (l *leader) serverMetrics(out chan<- prometheus.Metric) {
	sampling, known := l.sampling()
	if !known {
		return
	}
	s := sampling.Server
	out <- l.metrics.Value("horizon_age_seconds", s.HorizonAge)
	out <- l.metrics.Value("dead_tuples", float64(s.DeadTuples))
	out <- l.metrics.Value("database_connections", float64(s.Connections))
	out <- l.metrics.Value("database_connections_max", float64(s.MaxConnections))
	out <- l.metrics.Value("notify_queue_usage_ratio", s.NotifyUsage)
}

func (l *leader) electionMetrics(out chan<- prometheus.Metric) {
	s := l.elector.Status()
	out <- l.metrics.Value("leader_elected", telemetry.OneIf(s.Leading))
	out <- l.metrics.Value("leader_term", float64(s.Term))
	out <- l.metrics.Value("leader_term_age_seconds", s.Age.Seconds())
	out <- l.metrics.Value("leader_terms_total", float64(s.Changes))
	out <- l.metrics.Value("leader_row_age_seconds", s.SeenAgo.Seconds())
}

func (l *leader) hintMetrics(out chan<- prometheus.Metric) {
	if l.hinter != nil {
		out <- l.metrics.Value("hints_sent_total", float64(l.hinter.Sent.Load()))
		out <- l.metrics.Value("hints_dropped_total", float64(l.hinter.Dropped.Load()))
	}
}

func (l *leader) dutyMetrics(out chan<- prometheus.Metric) {
	d := l.duties.Load()
	if d == nil || !l.elector.Status().Leading {
		return // the sample of a former leader is old
	}
	l.lockMetrics(out, d.locks.Status())
	deadlines := d.deadlines.Status()
	out <- l.metrics.Value("entries_promoted_total", float64(deadlines.Promoted))
	out <- l.metrics.Value("entries_expired_total", float64(deadlines.Expired))
	out <- l.metrics.Value("deadlines_late_seconds", deadlines.Late.Seconds())
	out <- l.metrics.Value("deadlines_errors_total", float64(deadlines.Errors))
	out <- l.metrics.Value("entries_overrun", float64(deadlines.Overrun))
	out <- l.metrics.Value("entries_cancelled_late_total", float64(deadlines.Cancelled))
	fired := d.cron.Status()
	out <- l.metrics.Value("cron_fired_total", float64(fired.Fired))
	out <- l.metrics.Value("cron_dropped_total", float64(fired.Dropped))
	out <- l.metrics.Value("cron_broken_total", float64(fired.Broken))
	out <- l.metrics.Value("cron_late_seconds", fired.Late.Seconds())
	retention := d.retention.Status()
	out <- l.metrics.Value("retention_behind_seconds", retention.Behind.Seconds())
	out <- l.metrics.Value("retention_partitions_dropped_total", float64(retention.Dropped))
	out <- l.metrics.Value("retention_rows_tidied_total", float64(retention.Tidied))
	out <- l.metrics.Value("operations_changed_total", float64(d.operations.Changed()))
	out <- l.metrics.Value("statistics_counts_total", float64(d.depths.Counts()))
}

// errorMetrics are also those of terms that are over.
func (l *leader) errorMetrics(out chan<- prometheus.Metric) {
	for duty, n := range l.errors.Counts() {
		out <- l.metrics.Value("duty_errors_total", float64(n), duty)
	}
}

// lockMetrics are those of recovery.
func (l *leader) lockMetrics(out chan<- prometheus.Metric, locks recovery.LocksStatus) {
	out <- l.metrics.Value("locks", float64(locks.Held))
	out <- l.metrics.Value("locks_stuck", float64(locks.Stuck))
	out <- l.metrics.Value("nodes_dead", float64(locks.DeadNodes))
	out <- l.metrics.Value("leases_lapsed_total", float64(locks.Lapsed))
	out <- l.metrics.Value("recovery_suspended", telemetry.OneIf(locks.Suspended != ""))
	for _, cause := range []recovery.StuckCause{recovery.NodeDead, recovery.NodeGone, recovery.Unlisted} {
		out <- l.metrics.Value("recovery_locks_freed_total", float64(locks.Freed[cause]), string(cause))
	}
	out <- l.metrics.Value("recovery_unresolved_total", float64(locks.Unresolved))
	out <- l.metrics.Value("recovery_dead_lettered_total", float64(locks.DeadLettered))
	out <- l.metrics.Value("recovery_nodes_removed_total", float64(locks.Removed))
}

// scaleMetrics are those of the autoscaler of the elected leader.
func (l *leader) scaleMetrics(out chan<- prometheus.Metric) {
	d := l.duties.Load()
	if d == nil || !l.elector.Status().Leading {
		return
	}
	l.decisionMetrics(out, d.scaler.Status())
}

// decisionMetrics are those of its decisions and of its orders to backends.
func (l *leader) decisionMetrics(out chan<- prometheus.Metric, s scale.DutyStatus) {
	sums := l.metrics.Sums()
	for _, m := range s.Models {
		model := l.models.Label(m.Model)
		sums.Add("scale_requests", m.Metric, model)
		sums.Add("scale_waiting", float64(m.Waiting), model)
		sums.Add("scale_cost", m.Cost, model)
		desired := "desired"
		if !m.Applied {
			desired = "advised" // no instance is missing
		}
		for what, n := range map[string]int{
			"base": m.Base, "raw": m.Raw, "stabilised": m.Stabilised, desired: m.Desired, "ready": m.Ready,
			"starting": m.Started, "stuck": m.Stuck, "existing": m.Existing, "draining": m.Draining,
			"surplus": m.Surplus, "overdue": m.Overdue,
		} {
			sums.Add("scale_instances", float64(n), model, what)
		}
	}
	sums.Collect(out)
	out <- l.metrics.Value("scale_pass_seconds", s.Took.Seconds())
	out <- l.metrics.Value("scale_woken_total", float64(s.Woken))
	out <- l.metrics.Value("scale_orders_total", float64(s.Orders.Applied), "applied")
	out <- l.metrics.Value("scale_orders_total", float64(s.Orders.Failed), "failed")
	out <- l.metrics.Value("scale_on_demand_total", float64(s.Orders.Made), "made")
	out <- l.metrics.Value("scale_on_demand_total", float64(s.Orders.Pruned), "removed")
	out <- l.metrics.Value("scale_drained_total", float64(s.Orders.Drained))
	out <- l.metrics.Value("scale_expired_total", float64(s.Orders.Expired))
}

func (l *leader) poolMetrics(out chan<- prometheus.Metric) {
	for name, pool := range l.pools.byName() {
		l.metrics.Pool(out, name, pool)
	}
}

// requests counts the requests to the API.
type requests struct {
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newRequests(m telemetry.Metrics) *requests {
	return &requests{
		total:   m.Counter("http_requests_total"),
		seconds: m.Histogram("http_request_seconds", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
	}
}

func (r *requests) observe(route string, status int, took time.Duration) {
	r.total.WithLabelValues(route, strconv.Itoa(status)).Inc()
	if took > 0 {
		r.seconds.WithLabelValues(route).Observe(took.Seconds())
	}
}
