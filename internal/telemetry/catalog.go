package telemetry

import "slices"

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
	Gateway  = 4
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

func all(name, kind, help string, labels ...string) Metric {
	return Metric{Leader | TaskNode | Gateway, name, kind, help, labels}
}

// Catalog lists every metric, the first to read on call first; docs/metrics.md is generated from it.
func Catalog() []Metric { return append(slices.Clone(catalog), gatewayCatalog...) }

// Metrics about queues come from the elected leader's samples, so that each series exists once, at
// a cost that does not depend on the depth. The label queue is bounded, see Bound.
var catalog = []Metric{
	// State of the queues, by the elected leader.
	leader("queue_head_age_seconds", gauge, "the longest wait of an entry that is first in its lane, of the queue's "+
		"entry_priority or above, and in no paused flow; 0 if there is none. Read this metric first", "queue"),
	leader("queue_entries", gauge, "entries by state (initial, pending, computing, disabled, failed); reason is why "+
		"no node claims the pending ones, empty if none applies", "queue", "state", "reason"),
	leader("queue_estimated", gauge, "1 if the queue is so deep that its counts are estimates", "queue"),
	leader("queue_drain_per_second", gauge, "entries that left the queue a second, between the last two samples",
		"queue"),
	leader("queue_accepted_total", counter, "entries accepted since the statistics of the queue's table began; "+
		"those whose push was rolled back count as well", "queue"),
	leader("queue_gone_total", counter, "entries that left the queue, with any outcome; transactions that were "+
		"rolled back count as well", "queue"),
	leader("queue_serving_nodes", gauge, "live nodes that would claim from the queue", "queue"),
	leader("queue_dead_tuples", gauge, "dead rows of the queue's table that vacuum has not removed", "queue"),
	leader("model_slots", gauge, "slots of a model's instances by state: free (of those that take calls), held, "+
		"doubtful (held by a call that no node follows)", "model", "state"),
	leader("degraded", gauge, "1 for each condition that stops or slows work although processes run: code is "+
		"standstill (of a queue), dead_slots, quarantined or no_instance (of a model), no_hints (of a node), "+
		"storage_full or queue_full (pushes are refused), blocked_keys (of a queue, by failures), cron_broken (of a "+
		"cron job: no next run). "+
		"critical is whether nothing of the object goes on. `penstock doctor` gives details",
		"code", "object", "critical"),
	leader("sample_age_seconds", gauge, "age of the elected leader's last sample, which is also the age of the "+
		"metrics above"),
	leader("sample_seconds", gauge, "duration of that sample"),

	// The database.
	leader("horizon_age_seconds", gauge,
		"age of the oldest transaction, open or prepared, that keeps vacuum from cleaning"),
	leader("dead_tuples", gauge, "dead rows of the tables ready and lock, which every claim scans"),
	leader("database_connections", gauge, "client connections of the whole server"),
	leader("database_connections_max", gauge, "client connections that the server allows"),
	leader("notify_queue_usage_ratio", gauge,
		"how full the queue of NOTIFY is, 0 to 1; a listener that does not read fills it"),
	both("db_connections", gauge, "connections of a pool of this process", "pool"),
	both("db_connections_in_use", gauge, "connections of a pool that are in use", "pool"),
	both("db_waits_total", counter, "times a caller had to wait for a connection of a pool", "pool"),

	all("duty_errors_total", counter, "errors of a duty, which goes on; of those in a row the log has the first, "+
		"and one every ten minutes; of a leader in all of its terms", "duty"),

	// The election.
	leader("leader_elected", gauge, "1 if this process is the elected leader"),
	leader("leader_term", gauge, "newest term that this process has seen"),
	leader("leader_term_age_seconds", gauge, "since this process first saw the newest term"),
	leader("leader_terms_total", counter, "terms of the election so far"),
	leader("leader_row_age_seconds", gauge, "since the leader's row was last read or renewed; grows while the "+
		"database is unavailable"),

	// Duties of the elected leader, counted in this term.
	leader("locks", gauge, "lock records in the last pass of recovery"),
	leader("locks_stuck", gauge, "lock records that no node will settle; above 0 only for moments in a healthy system"),
	leader("nodes_dead", gauge, "nodes whose lease has lapsed and whose row is kept"),
	leader("leases_lapsed_total", counter, "times a node's lease lapsed between two passes of recovery"),
	leader("recovery_suspended", gauge, "1 while recovery frees nothing because many leases lapsed, the database "+
		"restarted or its clock jumped"),
	leader("recovery_locks_freed_total", counter, "stuck locks that were freed", "cause"),
	leader("recovery_unresolved_total", counter, "failed tries to free a lock; the log names the locks"),
	leader("recovery_dead_lettered_total", counter,
		"entries dead-lettered as poison: too many nodes died while they ran them"),
	leader("recovery_nodes_removed_total", counter, "rows of dead nodes that were removed"),
	leader("entries_promoted_total", counter, "entries that came due"),
	leader("entries_expired_total", counter, "entries whose deadline passed before they ran"),
	leader("entries_overrun", gauge,
		"entries that still run long after their finish_by; their handler ignores its context"),
	leader("entries_cancelled_late_total", counter,
		"entries cancelled after a run during which the cancel was requested"),
	leader("deadlines_late_seconds", gauge, "how far the last pass was behind the due times, at most; deadlines "+
		"(start_by, finish_by) do not count"),
	leader("deadlines_errors_total", counter, "failed batches of due entries; the log has the errors"),
	leader("cron_fired_total", counter, "entries of cron jobs that became pending"),
	leader("cron_dropped_total", counter,
		"times that the catch-up or overlap policy of a cron job dropped nominal times"),
	leader("cron_broken_total", counter, "times a cron job had an invalid schedule"),
	leader("cron_late_seconds", gauge, "lateness of the latest firing of the last pass that fired"),
	leader("retention_behind_seconds", gauge,
		"since the oldest partition that is left passed its retention; above a day, disk use grows"),
	leader("retention_partitions_dropped_total", counter,
		"partitions of results, failures and samples that were dropped"),
	leader("retention_rows_tidied_total", counter, "deleted rows without a purpose"),
	leader("operations_changed_total", counter, "entries and failures changed by bulk operations"),
	leader("statistics_counts_total", counter, "counts of bounded queues"),
	leader("scale_requests", gauge, "requests of a model that run, that may start, and that wait at gateways", "model"),
	leader("scale_waiting", gauge, "of these, requests that wait, in queues and at gateways", "model"),
	leader("scale_instances", gauge,
		"instances of a model; what: base, raw, stabilised, desired, ready, starting, stuck (starts that are not "+
			"ready in time, not among starting), existing (registered, or reported by a backend), draining (of "+
			"these), surplus (of these, beyond what their deployments are to have, without those that drain), overdue "+
			"(named for removal five minutes ago or earlier), advised (in place of desired, where no backend is told)",
		"model", "what"),
	leader("scale_cost", gauge, "cost an hour of the instances of a model that exist, in the unit of the "+
		"deployments' cost", "model"),
	leader("scale_pass_seconds", gauge, "duration of the last pass of decisions"),
	leader("scale_woken_total", counter, "decisions that a push or request for a model without instances caused"),
	leader("scale_orders_total", counter, "orders to backends; outcome: applied, failed (failed lists of instances "+
		"count too)", "outcome"),
	leader("scale_on_demand_total", counter, "deployments on demand; outcome: made, removed", "outcome"),
	leader("scale_drained_total", counter, "instances whose drain the autoscaler began"),
	leader("scale_expired_total", counter, "instances removed because their time to live ended"),

	// The API of a leader.
	leader("http_requests_total", counter, "requests answered; 499 are clients that went away", "route", "status"),
	leader("http_request_seconds", histogram, "time to answer a request", "route"),
	leader("hints_sent_total", counter, "hints sent to nodes"),
	leader("hints_dropped_total", counter, "hints that the database refused; nodes then find work by polling"),

	// Task nodes.
	node("node_wait_seconds", histogram, "from the acceptance of an entry to its run, the time until it was due "+
		"included", "queue"),
	node("node_run_seconds", histogram, "time in the handler; of entries that run together, each one's part",
		"queue"),
	node("node_run_errors_total", counter, "runs that returned an error, missing capacity included; snoozes "+
		"are none", "queue"),
	node("node_claim_seconds", histogram, "time for a claim, empty ones too"),
	node("node_claimed_total", counter, "locks claimed", "queue"),
	node("node_refusals_total", counter, "claims that were not tried or returned no entry, by the missing resource: "+
		"threads, queue_limit (a node's share), slots, limit, or a reason of the governor", "queue", "reason"),
	node("node_model_calls_total", counter, "calls to workers of a model", "model"),
	node("node_model_entries_total", counter, "entries in these calls: more than calls where the model takes batches",
		"model"),
	node("node_model_swaps_total", counter, "calls for which a worker had to load another adapter or model than for "+
		"its last call",
		"model"),
	node("node_model_slots", gauge, "slots of a model that the node has leased, by state: busy, idle", "model",
		"state"),
	node("node_settles_total", counter, "transactions that recorded endings"),
	node("node_settle_seconds_total", counter, "time in them"),
	node("node_settled_total", counter, "endings recorded"),
	node("node_settle_refused_total", counter, "endings refused because the lock was lost: another node has the entry"),
	node("node_settle_repeated_total", counter, "endings that were recorded before, and sent again since the answer "+
		"was lost"),
	node("node_endings_unrecorded_total", counter,
		"endings that could not be recorded and were left to recovery: their entries run again"),
	node("node_leases_lost_total", counter, "times the node's lease ran out; it cancelled its runs"),
	node("node_threads", gauge, "processing threads"),
	node("node_locks", gauge, "locks that the node holds"),
	node("hints_connected", gauge,
		"1 if hints arrive, as the last round trip showed; without, nodes find work by polling"),
	node("hints_heard_total", counter, "hints that arrived"),
	node("hints_reconnects_total", counter, "times the connection for hints was lost"),
	node("hints_round_trip_seconds", gauge, "of the last round trip of a hint"),
}
