package main

import (
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/penstock/penstock/pkg/recovery"
)

// registry holds all that /metrics shows. What duties count begins anew with each term.
func (l *leader) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		l.requests.total, l.requests.seconds,
		collector{l.electionMetrics}, collector{l.hintMetrics}, collector{l.dutyMetrics}, collector{l.poolMetrics},
	)
	return r
}

// collector reads values when it is asked for them. It describes nothing beforehand, as Prometheus allows.
type collector struct {
	collect func(out chan<- prometheus.Metric)
}

func (c collector) Describe(chan<- *prometheus.Desc)         {}
func (c collector) Collect(metrics chan<- prometheus.Metric) { c.collect(metrics) }

// gauge and counter make one value. Labels are name and value in turn.
func gauge(name, help string, value float64, labels ...string) prometheus.Metric {
	return metric(prometheus.GaugeValue, name, help, value, labels)
}

func counter(name, help string, value float64, labels ...string) prometheus.Metric {
	return metric(prometheus.CounterValue, name, help, value, labels)
}

func metric(kind prometheus.ValueType, name, help string, value float64, labels []string) prometheus.Metric {
	var names, values []string
	for i := 0; i+1 < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	return prometheus.MustNewConstMetric(prometheus.NewDesc("penstock_"+name, help, names, nil), kind, value, values...)
}

func oneIf(set bool) float64 {
	if set {
		return 1
	}
	return 0
}

func (l *leader) electionMetrics(out chan<- prometheus.Metric) {
	s := l.elector.Status()
	out <- gauge("leader_elected", "1 if this process is the elected leader", oneIf(s.Leading))
	out <- gauge("leader_term", "newest term that this process has seen", float64(s.Term))
	out <- gauge("leader_term_age_seconds", "since this process first saw the newest term", s.Age.Seconds())
	out <- counter("leader_terms_total", "terms of the election so far", float64(s.Changes))
	out <- gauge("leader_row_age_seconds", "since the leader's row was last read or renewed; grows when the database is away", s.SeenAgo.Seconds())
}

func (l *leader) hintMetrics(out chan<- prometheus.Metric) {
	if l.hinter != nil {
		out <- counter("hints_sent_total", "hints that nodes were sent", float64(l.hinter.Sent.Load()))
		out <- counter("hints_dropped_total", "hints that the database did not take", float64(l.hinter.Dropped.Load()))
	}
}

func (l *leader) dutyMetrics(out chan<- prometheus.Metric) {
	d := l.duties.Load()
	if d == nil {
		return
	}
	locks := d.locks.Status()
	out <- gauge("locks", "lock records at the last look of recovery", float64(locks.Held))
	out <- gauge("locks_stuck", "lock records that nobody will settle; should be 0 but for moments", float64(locks.Stuck))
	out <- gauge("nodes_dead", "nodes whose lease has lapsed and whose row is kept", float64(locks.DeadNodes))
	out <- gauge("recovery_suspended", "1 while recovery frees nothing because many leases lapsed, the database restarted or its clock jumped", oneIf(locks.Suspended != ""))
	for _, cause := range []recovery.Cause{recovery.NodeDead, recovery.NodeGone, recovery.Unlisted} {
		out <- counter("recovery_locks_freed_total", "stuck locks that were freed", float64(locks.Freed[cause]), "cause", string(cause))
	}
	out <- counter("recovery_unresolved_total", "tries to free a lock that did not; the log says which", float64(locks.Unresolved))
	out <- counter("recovery_set_aside_total", "entries set aside because too many nodes died while they ran them", float64(locks.SetAside))
	out <- counter("recovery_nodes_removed_total", "rows of dead nodes that were removed", float64(locks.Removed))

	deadlines := d.deadlines.Status()
	out <- counter("entries_promoted_total", "entries that came due", float64(deadlines.Promoted))
	out <- counter("entries_expired_total", "entries whose deadline passed before they ran", float64(deadlines.Expired))
	out <- gauge("deadlines_late_seconds", "how far the last pass was behind the due times, at most", deadlines.Late.Seconds())
	out <- counter("deadlines_errors_total", "batches of due entries that went wrong; the log says why", float64(deadlines.Errors))
	out <- gauge("entries_overrun", "entries that run on long after their finish_by; their node does not end them", float64(deadlines.Overrun))
	out <- counter("entries_cancelled_late_total", "entries ended because somebody had wished it while they ran", float64(deadlines.Ended))
	fired := d.cron.Status()
	out <- counter("cron_fired_total", "entries of cron jobs that were put into line", float64(fired.Fired))
	out <- counter("cron_dropped_total", "nominal times given up by catch-up or overlap policy", float64(fired.Dropped))
	out <- counter("cron_broken_total", "times a cron job had a schedule that could not be read", float64(fired.Broken))
	out <- gauge("cron_late_seconds", "lateness of the latest firing of the last pass that fired", fired.Late.Seconds())
	retention := d.retention.Status()
	out <- gauge("retention_behind_seconds", "since the oldest partition that is left passed its retention", retention.Behind.Seconds())
	out <- counter("retention_partitions_dropped_total", "partitions of results and failures that were dropped", float64(retention.Dropped))
	out <- counter("retention_rows_tidied_total", "rows that stood for nothing any more", float64(retention.Tidied))
	out <- counter("operations_changed_total", "entries and failures changed by bulk operations", float64(d.operations.Changed()))
	out <- counter("statistics_counts_total", "counts of bounded queues", float64(d.statistics.Counts()))
}

func (l *leader) poolMetrics(out chan<- prometheus.Metric) {
	for name, pool := range map[string]*pgxpool.Pool{"api": l.pools.api, "duties": l.pools.duties, "election": l.pools.election} {
		s := pool.Stat()
		out <- gauge("db_connections", "connections of a pool", float64(s.TotalConns()), "pool", name)
		out <- gauge("db_connections_in_use", "connections of a pool that are in use", float64(s.AcquiredConns()), "pool", name)
		out <- counter("db_waits_total", "times somebody had to wait for a connection of a pool", float64(s.EmptyAcquireCount()), "pool", name)
	}
}

// requests counts what the API answers.
type requests struct {
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newRequests() *requests {
	return &requests{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "penstock_http_requests_total", Help: "requests answered",
		}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "penstock_http_request_seconds", Help: "time to answer a request",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, 1, 5, 10},
		}, []string{"route"}),
	}
}

func (r *requests) observe(route string, status int, took time.Duration) {
	r.total.WithLabelValues(route, strconv.Itoa(status)).Inc()
	r.seconds.WithLabelValues(route).Observe(took.Seconds())
}
