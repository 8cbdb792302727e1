package telemetry

// The kinds of metric.
const (
	gauge     = "gauge"
	counter   = "counter"
	histogram = "histogram"
)

// The programs that have metrics, as bits.
const (
	Leader   = 1
	TaskNode = 2
)

// Metric is one thing that can be scraped.
type Metric struct {
	From   int    // which programs have it
	Name   string // after penstock_
	Kind   string
	Help   string
	Labels []string
}

// Catalog lists every metric in the order in which somebody on call reads them; docs/metrics.md is made of it. Metrics
// about queues come from the elected leader's samples, so that they are there once, and cost the same at any depth.
// The label queue is bounded, see Bound.
func Catalog() []Metric {
	l := func(name, kind, help string, labels ...string) Metric {
		return Metric{Leader, name, kind, help, labels}
	}
	n := func(name, kind, help string, labels ...string) Metric {
		return Metric{TaskNode, name, kind, help, labels}
	}
	b := func(name, kind, help string, labels ...string) Metric {
		return Metric{Leader | TaskNode, name, kind, help, labels}
	}
	return []Metric{
		// How queues stand, by the elected leader.
		l("queue_head_age_seconds", gauge, "how long the entry has waited that a node would take first; 0 if there is none. The first thing to look at", "queue"),
		l("queue_entries", gauge, "entries by state (initial, pending, computing, disabled, failed); reason says why no node claims those that are pending, empty if nothing is in the way", "queue", "state", "reason"),
		l("queue_estimated", gauge, "1 if the queue is so deep that its counts are estimates", "queue"),
		l("queue_drain_per_second", gauge, "entries that left the queue a second, between the last two samples", "queue"),
		l("queue_accepted_total", counter, "entries accepted since the statistics of the queue's table began", "queue"),
		l("queue_gone_total", counter, "entries that left the queue, however they ended", "queue"),
		l("queue_serving_nodes", gauge, "live nodes that would claim from the queue", "queue"),
		l("queue_dead_tuples", gauge, "dead rows of the queue's table that vacuum has not removed", "queue"),
		l("model_slots", gauge, "slots of a model's usable instances by state: free, held, doubtful (held by a call that nobody follows)", "model", "state"),
		l("sample_age_seconds", gauge, "since the elected leader looked at the queues; the metrics above are as old"),
		l("sample_seconds", gauge, "how long that look took"),

		// The database.
		l("horizon_age_seconds", gauge, "age of the oldest transaction that keeps vacuum from cleaning"),
		l("dead_tuples", gauge, "dead rows of the tables ready and lock, which every claim walks"),
		l("database_connections", gauge, "client connections of the whole server"),
		l("database_connections_max", gauge, "what the server allows"),
		l("notify_queue_usage_ratio", gauge, "how full the queue of NOTIFY is, 0 to 1; a listener that does not read fills it"),
		b("db_connections", gauge, "connections of a pool of this process", "pool"),
		b("db_connections_in_use", gauge, "connections of a pool that are in use", "pool"),
		b("db_waits_total", counter, "times somebody had to wait for a connection of a pool", "pool"),

		// Who leads.
		l("leader_elected", gauge, "1 if this process is the elected leader"),
		l("leader_term", gauge, "newest term that this process has seen"),
		l("leader_term_age_seconds", gauge, "since this process first saw the newest term"),
		l("leader_terms_total", counter, "terms of the election so far"),
		l("leader_row_age_seconds", gauge, "since the leader's row was last read or renewed; grows when the database is away"),

		// What the elected leader's duties found and did in this term.
		l("locks", gauge, "lock records at the last look of recovery"),
		l("locks_stuck", gauge, "lock records that nobody will settle; should be 0 but for moments"),
		l("nodes_dead", gauge, "nodes whose lease has lapsed and whose row is kept"),
		l("leases_lapsed_total", counter, "times a node's lease lapsed while somebody looked"),
		l("recovery_suspended", gauge, "1 while recovery frees nothing because many leases lapsed, the database restarted or its clock jumped"),
		l("recovery_locks_freed_total", counter, "stuck locks that were freed", "cause"),
		l("recovery_unresolved_total", counter, "tries to free a lock that did not; the log says which"),
		l("recovery_set_aside_total", counter, "entries set aside because too many nodes died while they ran them"),
		l("recovery_nodes_removed_total", counter, "rows of dead nodes that were removed"),
		l("entries_promoted_total", counter, "entries that came due"),
		l("entries_expired_total", counter, "entries whose deadline passed before they ran"),
		l("entries_overrun", gauge, "entries that run on long after their finish_by; their node does not end them"),
		l("entries_cancelled_late_total", counter, "entries ended because somebody had wished it while they ran"),
		l("deadlines_late_seconds", gauge, "how far the last pass was behind the due times, at most"),
		l("deadlines_errors_total", counter, "batches of due entries that went wrong; the log says why"),
		l("cron_fired_total", counter, "entries of cron jobs that were put into line"),
		l("cron_dropped_total", counter, "nominal times given up by catch-up or overlap policy"),
		l("cron_broken_total", counter, "times a cron job had a schedule that could not be read"),
		l("cron_late_seconds", gauge, "lateness of the latest firing of the last pass that fired"),
		l("retention_behind_seconds", gauge, "since the oldest partition that is left passed its retention; more than a day, and the disk fills"),
		l("retention_partitions_dropped_total", counter, "partitions of results, failures and samples that were dropped"),
		l("retention_rows_tidied_total", counter, "rows that stood for nothing any more"),
		l("operations_changed_total", counter, "entries and failures changed by bulk operations"),
		l("statistics_counts_total", counter, "counts of bounded queues"),

		// The API of a leader.
		l("http_requests_total", counter, "requests answered", "route", "status"),
		l("http_request_seconds", histogram, "time to answer a request", "route"),
		l("hints_sent_total", counter, "hints that nodes were sent"),
		l("hints_dropped_total", counter, "hints that the database did not take; nodes then find work by polling"),

		// Task nodes.
		n("node_wait_seconds", histogram, "from the acceptance of an entry to its run, the time until it was due included", "queue"),
		n("node_run_seconds", histogram, "time in the handler", "queue"),
		n("node_run_errors_total", counter, "runs that returned an error, missing capacity included", "queue"),
		n("node_claim_seconds", histogram, "time for a claim, empty ones too"),
		n("node_claimed_total", counter, "locks claimed", "queue"),
		n("node_refusals_total", counter, "claims that were not tried or brought nothing for want of something: threads, queue_limit (a node's share), slots, limit, or what the governor says", "queue", "reason"),
		n("node_settles_total", counter, "transactions that recorded endings"),
		n("node_settle_seconds_total", counter, "time in them"),
		n("node_settled_total", counter, "endings recorded"),
		n("node_settle_refused_total", counter, "endings refused because the lock was lost: somebody else has the entry"),
		n("node_leases_lost_total", counter, "times the node's lease ran out; it ended all it ran"),
		n("node_threads", gauge, "processing threads"),
		n("node_locks", gauge, "locks that the node holds"),
		n("hints_connected", gauge, "1 if hints arrive, as the last round trip showed; without, nodes find work by polling"),
		n("hints_heard_total", counter, "hints that arrived"),
		n("hints_reconnects_total", counter, "times the connection for hints was lost"),
		n("hints_round_trip_seconds", gauge, "of the last round trip of a hint"),
	}
}
