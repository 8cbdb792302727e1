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

func leader(name, kind, help string, labels ...string) Metric {
	return Metric{Leader, name, kind, help, labels}
}

func node(name, kind, help string, labels ...string) Metric {
	return Metric{TaskNode, name, kind, help, labels}
}

func both(name, kind, help string, labels ...string) Metric {
	return Metric{Leader | TaskNode, name, kind, help, labels}
}

// Catalog lists every metric in the order in which somebody on call reads them; docs/metrics.md is made of it.
func Catalog() []Metric { return catalog }

// Metrics about queues come from the elected leader's samples, so that they are there once, and cost the same at any
// depth. The label queue is bounded, see Bound.
var catalog = []Metric{
	// How queues stand, by the elected leader.
	leader("queue_head_age_seconds", gauge, "how long the entry has waited that a node would take first; 0 if there is none. The first thing to look at", "queue"),
	leader("queue_entries", gauge, "entries by state (initial, pending, computing, disabled, failed); reason says why no node claims those that are pending, empty if nothing is in the way", "queue", "state", "reason"),
	leader("queue_estimated", gauge, "1 if the queue is so deep that its counts are estimates", "queue"),
	leader("queue_drain_per_second", gauge, "entries that left the queue a second, between the last two samples",
		"queue"),
	leader("queue_accepted_total", counter, "entries accepted since the statistics of the queue's table began",
		"queue"),
	leader("queue_gone_total", counter, "entries that left the queue, however they ended", "queue"),
	leader("queue_serving_nodes", gauge, "live nodes that would claim from the queue", "queue"),
	leader("queue_dead_tuples", gauge, "dead rows of the queue's table that vacuum has not removed", "queue"),
	leader("model_slots", gauge, "slots of a model's usable instances by state: free, held, doubtful (held by a call that nobody follows)", "model", "state"),
	leader("degraded", gauge, "1 for each state in which work stands still or is slow while processes run: code is standstill (of a queue), dead_slots, quarantined or no_instance (of a model), no_hints (of a node). `penstock doctor` says more", "code", "object"),
	leader("sample_age_seconds", gauge, "since the elected leader looked at the queues; the metrics above are as old"),
	leader("sample_seconds", gauge, "how long that look took"),

	// The database.
	leader("horizon_age_seconds", gauge, "age of the oldest transaction that keeps vacuum from cleaning"),
	leader("dead_tuples", gauge, "dead rows of the tables ready and lock, which every claim walks"),
	leader("database_connections", gauge, "client connections of the whole server"),
	leader("database_connections_max", gauge, "what the server allows"),
	leader("notify_queue_usage_ratio", gauge, "how full the queue of NOTIFY is, 0 to 1; a listener that does not read fills it"),
	both("db_connections", gauge, "connections of a pool of this process", "pool"),
	both("db_connections_in_use", gauge, "connections of a pool that are in use", "pool"),
	both("db_waits_total", counter, "times somebody had to wait for a connection of a pool", "pool"),

	// Who leads.
	leader("leader_elected", gauge, "1 if this process is the elected leader"),
	leader("leader_term", gauge, "newest term that this process has seen"),
	leader("leader_term_age_seconds", gauge, "since this process first saw the newest term"),
	leader("leader_terms_total", counter, "terms of the election so far"),
	leader("leader_row_age_seconds", gauge, "since the leader's row was last read or renewed; grows when the database is away"),

	// What the elected leader's duties found and did in this term.
	leader("locks", gauge, "lock records at the last look of recovery"),
	leader("locks_stuck", gauge, "lock records that nobody will settle; should be 0 but for moments"),
	leader("nodes_dead", gauge, "nodes whose lease has lapsed and whose row is kept"),
	leader("leases_lapsed_total", counter, "times a node's lease lapsed while somebody looked"),
	leader("recovery_suspended", gauge, "1 while recovery frees nothing because many leases lapsed, the database restarted or its clock jumped"),
	leader("recovery_locks_freed_total", counter, "stuck locks that were freed", "cause"),
	leader("recovery_unresolved_total", counter, "tries to free a lock that did not; the log says which"),
	leader("recovery_dead_lettered_total", counter,
		"entries dead-lettered as poison: too many nodes died while they ran them"),
	leader("recovery_nodes_removed_total", counter, "rows of dead nodes that were removed"),
	leader("entries_promoted_total", counter, "entries that came due"),
	leader("entries_expired_total", counter, "entries whose deadline passed before they ran"),
	leader("entries_overrun", gauge, "entries that run on long after their finish_by; their node does not end them"),
	leader("entries_cancelled_late_total", counter, "entries ended because somebody had wished it while they ran"),
	leader("deadlines_late_seconds", gauge, "how far the last pass was behind the due times, at most"),
	leader("deadlines_errors_total", counter, "batches of due entries that went wrong; the log says why"),
	leader("cron_fired_total", counter, "entries of cron jobs that were put into line"),
	leader("cron_dropped_total", counter, "nominal times given up by catch-up or overlap policy"),
	leader("cron_broken_total", counter, "times a cron job had a schedule that could not be read"),
	leader("cron_late_seconds", gauge, "lateness of the latest firing of the last pass that fired"),
	leader("retention_behind_seconds", gauge, "since the oldest partition that is left passed its retention; more than a day, and the disk fills"),
	leader("retention_partitions_dropped_total", counter,
		"partitions of results, failures and samples that were dropped"),
	leader("retention_rows_tidied_total", counter, "rows that stood for nothing any more"),
	leader("operations_changed_total", counter, "entries and failures changed by bulk operations"),
	leader("statistics_counts_total", counter, "counts of bounded queues"),

	// The API of a leader.
	leader("http_requests_total", counter, "requests answered", "route", "status"),
	leader("http_request_seconds", histogram, "time to answer a request", "route"),
	leader("hints_sent_total", counter, "hints that nodes were sent"),
	leader("hints_dropped_total", counter, "hints that the database did not take; nodes then find work by polling"),

	// Task nodes.
	node("node_wait_seconds", histogram, "from the acceptance of an entry to its run, the time until it was due included", "queue"),
	node("node_run_seconds", histogram, "time in the handler", "queue"),
	node("node_run_errors_total", counter, "runs that returned an error, missing capacity included", "queue"),
	node("node_claim_seconds", histogram, "time for a claim, empty ones too"),
	node("node_claimed_total", counter, "locks claimed", "queue"),
	node("node_refusals_total", counter, "claims that were not tried or brought nothing for want of something: threads, queue_limit (a node's share), slots, limit, or what the governor says", "queue", "reason"),
	node("node_model_calls_total", counter, "calls to workers of a model", "model"),
	node("node_model_entries_total", counter, "entries that these carried: more than calls where the model takes batches", "model"),
	node("node_model_swaps_total", counter, "calls for which a worker had to load another thing than it ran last",
		"model"),
	node("node_model_slots", gauge, "slots of a model that the node has leased, by state: busy, idle", "model",
		"state"),
	node("node_settles_total", counter, "transactions that recorded endings"),
	node("node_settle_seconds_total", counter, "time in them"),
	node("node_settled_total", counter, "endings recorded"),
	node("node_settle_refused_total", counter, "endings refused because the lock was lost: somebody else has the entry"),
	node("node_endings_unrecorded_total", counter,
		"endings that could not be recorded and were left to recovery: their entries run again"),
	node("node_leases_lost_total", counter, "times the node's lease ran out; it ended all it ran"),
	node("node_threads", gauge, "processing threads"),
	node("node_locks", gauge, "locks that the node holds"),
	node("hints_connected", gauge, "1 if hints arrive, as the last round trip showed; without, nodes find work by polling"),
	node("hints_heard_total", counter, "hints that arrived"),
	node("hints_reconnects_total", counter, "times the connection for hints was lost"),
	node("hints_round_trip_seconds", gauge, "of the last round trip of a hint"),
}
