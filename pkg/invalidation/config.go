package invalidation

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Kind is the purpose of a queue: it decides which handlers and functions serve it.
type Kind string

// The kinds of queue.
const (
	KindTask      Kind = "task"
	KindBatch     Kind = "batch"
	KindCron      Kind = "cron"
	KindChangeLog Kind = "change_log"
	KindInference Kind = "inference"
	KindWebhook   Kind = "webhook"
)

// ours reports whether only Penstock itself pushes to queues of the kind.
func (k Kind) ours() bool { return k == KindWebhook || k == KindBatch }

// Lapse is the policy for running entries while their node cannot renew its lease.
type Lapse string

// The policies for a lapsed lease.
const (
	// LapseEnd ends the runs at three quarters of the lease, before other nodes can be given their entries.
	LapseEnd Lapse = "end"
	// LapseRunThrough lets them go on. Their endings are recorded once the database is reached, if their
	// locks still have their tokens. If only this node was cut off, others may run the entries meanwhile.
	LapseRunThrough Lapse = "run_through"
)

// OnFailure is the policy for a lock key when one of its entries fails for good.
type OnFailure string

// The policies for a failure within a key.
const (
	// OnFailureContinue runs the next entry of the key.
	OnFailureContinue OnFailure = "continue"
	// OnFailureBlockKey keeps later entries of the key from running until an operator unblocks it.
	OnFailureBlockKey OnFailure = "block_key"
)

// OnNoInstance is the policy for entries while no instance of the queue's model takes calls.
type OnNoInstance string

// The policies for a model without a usable instance.
const (
	OnNoInstanceWait OnNoInstance = "wait" // for an instance
	// OnNoInstanceFail refuses pushes with ErrNoInstance.
	OnNoInstanceFail OnNoInstance = "fail"
)

// Config is the settings of a queue. A zero field means its default.
type Config struct {
	Kind        Kind    // task
	Application string  // "default"; only nodes of this application serve the queue
	Priority    float64 // weight between queues: 1
	// EntryPriority is the priority of entries that name none, 0 to 9, higher first: 1.
	EntryPriority int
	Algorithm     string // between flows: "fair" (default) or "fifo"
	// Grouping is the path of the lock key in the payload: a field, a path with dots, a jsonpath
	// that starts with "$".
	Grouping             string
	Mergeable            bool
	Merge                string // of compaction: "last" (default), "first", "object", "array"
	MaxConcurrent        int    // locks at once over all nodes; 0 for no limit
	MaxConcurrentPerNode int    // locks at once on one node; 0 for no limit
	// MaxConcurrentPerName is entries of one name at once over all nodes, 1 to 100; 0 for no limit. Entries with a
	// name have lock keys of that name then, and no order among them unless it is 1.
	MaxConcurrentPerName int
	// MaxWeight is the largest Push.Weight that entries may have, 1 to 1000: 1. Under it an entry takes its weight
	// times the units of each limit of the queue, MaxConcurrent as well.
	MaxWeight int
	// Shards is flows over which entries that name none are spread by their lock keys, 1 to 64: 1, which is none.
	Shards          int
	Capacity        int64 // entries; 0 for no bound
	CapacityPerFlow int64 // entries of one flow; 0 for no bound
	// CapacityPerSlot is entries for each slot of the usable instances of the model, of one slot at least; 0 for
	// no bound.
	CapacityPerSlot float64
	// OnNoInstance is the policy for entries while no instance of the model takes calls: wait.
	// With OnNoInstanceFail entries that have waited fail when that has lasted NoInstanceTimeout: 1
	// minute.
	OnNoInstance      OnNoInstance
	NoInstanceTimeout time.Duration
	Retry             RetryPolicy
	CrashLimit        int           // deaths of nodes under one entry before it is dead-lettered as poison: 3
	RunTimeout        time.Duration // of one run; 0 for none
	// StartWithin and FinishWithin give entries without a deadline of their own one, counted from the push or
	// the due time; 0 for none.
	StartWithin, FinishWithin time.Duration
	OnFailure                 OnFailure     // of an entry with a lock key: continue
	QuantumCount              int           // entries of one key under one lock: 100
	QuantumTime               time.Duration // how long one key keeps its lock while others wait: 10 s
	PayloadLimit              int           // bytes as stored: 256 KiB
	// ResultRetention is how long an outcome can be read after the entry is gone: 24 h. Negative keeps none.
	ResultRetention  time.Duration
	FailureRetention time.Duration // 30 days
	Model            string        // for kind inference
	Lapse            Lapse         // run_through for queues with a model, end for others
	Needs            Needs         // of one entry while it runs
}

// Needs is the use of the node by one entry while it runs. Nodes with a governor run no more entries than fit.
type Needs struct {
	CPU       float64 `json:"cpu,omitempty"`        // cores
	MemoryMiB float64 `json:"memory_mib,omitempty"` // MiB
}

// Control is the actor, time and reason of a pause or of disabling.
type Control struct {
	At     time.Time
	Until  time.Time // on this process's clock; zero: until it is resumed
	Actor  string
	Reason string
}

// CountsDepth reports whether the depth of the queue is counted: it has a bound that is not that of a flow.
func (c *Config) CountsDepth() bool { return c.Capacity != 0 || c.CapacityPerSlot != 0 }

// options are the settings that differ from their zero value, as penstock.alter_queue takes them.
func (c Config) options() (map[string]any, error) {
	set := map[string]any{}
	put := func(name string, given bool, value any) {
		if given {
			set[name] = value
		}
	}
	put("kind", c.Kind != "", c.Kind)
	put("application", c.Application != "", c.Application)
	put("priority", c.Priority != 0, c.Priority)
	put("entry_priority", c.EntryPriority != 0, c.EntryPriority)
	put("algorithm", c.Algorithm != "", c.Algorithm)
	put("grouping", c.Grouping != "", c.Grouping)
	put("mergeable", c.Mergeable, c.Mergeable)
	put("merge", c.Merge != "", c.Merge)
	put("max_concurrent", c.MaxConcurrent != 0, c.MaxConcurrent)
	put("max_concurrent_per_node", c.MaxConcurrentPerNode != 0, c.MaxConcurrentPerNode)
	put("max_concurrent_per_name", c.MaxConcurrentPerName != 0, c.MaxConcurrentPerName)
	put("max_weight", c.MaxWeight != 0, c.MaxWeight)
	put("shards", c.Shards != 0, c.Shards)
	put("capacity", c.Capacity != 0, c.Capacity)
	put("capacity_per_flow", c.CapacityPerFlow != 0, c.CapacityPerFlow)
	put("capacity_per_slot", c.CapacityPerSlot != 0, c.CapacityPerSlot)
	put("on_no_instance", c.OnNoInstance != "", c.OnNoInstance)
	put("no_instance_timeout", c.NoInstanceTimeout != 0, interval(c.NoInstanceTimeout))
	put("crash_limit", c.CrashLimit != 0, c.CrashLimit)
	put("run_timeout", c.RunTimeout != 0, interval(c.RunTimeout))
	put("start_within", c.StartWithin != 0, interval(c.StartWithin))
	put("finish_within", c.FinishWithin != 0, interval(c.FinishWithin))
	put("on_failure", c.OnFailure != "", c.OnFailure)
	put("quantum_count", c.QuantumCount != 0, c.QuantumCount)
	put("quantum_time", c.QuantumTime != 0, interval(c.QuantumTime))
	put("payload_limit", c.PayloadLimit != 0, c.PayloadLimit)
	put("result_retention", c.ResultRetention != 0, interval(max(c.ResultRetention, 0)))
	put("failure_retention", c.FailureRetention != 0, interval(c.FailureRetention))
	put("model", c.Model != "", c.Model)
	put("lapse", c.Lapse != "", c.Lapse)
	put("needs", c.Needs != (Needs{}), c.Needs)
	if !c.Retry.isZero() {
		if err := c.Retry.check(); err != nil {
			return nil, err
		}
		set["retry"] = c.Retry
	}
	return set, nil
}

// interval writes a duration as Postgres reads an interval.
func interval(d time.Duration) string { return fmt.Sprintf("%d microseconds", d.Microseconds()) }

// configColumns are read with two more for scanQueue: the pauses and the weights of flows, null where they are not
// asked for.
const configColumns = `kind::text, application, priority, entry_priority, algorithm, coalesce(grouping, ''),
       mergeable, merge,
       coalesce(max_concurrent, 0), coalesce(max_concurrent_per_node, 0),
       coalesce(max_concurrent_per_name, 0), max_weight, weighed, shards, coalesce(capacity, 0),
       coalesce(capacity_per_flow, 0), coalesce(capacity_per_slot, 0)::float8,
       on_no_instance, no_instance_timeout, retry, crash_limit,
       coalesce(run_timeout, '0'), coalesce(start_within, '0'), coalesce(finish_within, '0'), on_failure,
       quantum_count, quantum_time, payload_limit, result_retention, failure_retention,
       coalesce(model, ''), coalesce(lapse, CASE WHEN model IS NULL THEN 'end' ELSE 'run_through' END),
       least(coalesce(round((needs->>'cpu')::numeric, 6), 0), 1000000)::float8,
       coalesce(round((needs->>'memory_mib')::numeric, 6), 0)::float8,
       paused_at, extract(epoch FROM paused_until - clock_timestamp())::float8, coalesce(paused_by, ''),
       coalesce(paused_reason, ''),
       disabled_at, coalesce(disabled_by, ''), coalesce(disabled_reason, ''),
       ARRAY(SELECT u.limit_id FROM penstock.limit_use u WHERE u.queue_id = queue.id ORDER BY u.limit_id),
       (SELECT jsonb_object_agg(s.key, penstock.statement_sql(s.key, s.value)) FROM jsonb_each_text(statements) s),
       penstock.queue_rate_kind(id)`

func scanQueue(row pgx.CollectableRow) (*Queue, error) {
	var (
		q                      Queue
		c                      = &q.Config
		retry, pauses, weights []byte
		pausedAt, disabled     *time.Time
		pauseLeft              *float64 // seconds
		paused, off            Control
	)
	err := row.Scan(&q.ID, &q.Name, &c.Kind, &c.Application, &c.Priority, &c.EntryPriority, &c.Algorithm, &c.Grouping,
		&c.Mergeable, &c.Merge, &c.MaxConcurrent, &c.MaxConcurrentPerNode, &c.MaxConcurrentPerName,
		&c.MaxWeight, &q.mayWeigh, &c.Shards, &c.Capacity, &c.CapacityPerFlow, &c.CapacityPerSlot,
		&c.OnNoInstance, &c.NoInstanceTimeout,
		&retry, &c.CrashLimit,
		&c.RunTimeout, &c.StartWithin, &c.FinishWithin, &c.OnFailure, &c.QuantumCount, &c.QuantumTime, &c.PayloadLimit,
		&c.ResultRetention, &c.FailureRetention,
		&c.Model, &c.Lapse, &c.Needs.CPU, &c.Needs.MemoryMiB, &pausedAt, &pauseLeft, &paused.Actor, &paused.Reason,
		&disabled, &off.Actor, &off.Reason,
		&q.limits, &q.Statements, &q.rates, &pauses, &weights)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(retry, &c.Retry); err != nil {
		return nil, fmt.Errorf("read retry policy of queue %q: %w", q.Name, err)
	}
	if q.pauses, err = readPauses(pauses); err != nil {
		return nil, fmt.Errorf("queue %q: %w", q.Name, err)
	}
	if q.weights, err = readWeights(weights); err != nil {
		return nil, fmt.Errorf("queue %q: %w", q.Name, err)
	}
	if pausedAt != nil {
		paused.At, paused.Until = *pausedAt, endOfPause(pauseLeft)
		q.paused = &paused
	}
	if disabled != nil {
		off.At = *disabled
		q.Disabled = &off
	}
	return &q, nil
}
