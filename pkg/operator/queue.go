package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Queue is a queue with its counts, pause and bounds.
type Queue struct {
	Name            string     `json:"name"`
	Kind            string     `json:"kind" doc:"task, batch, cron, change_log, inference or webhook."`
	Application     string     `json:"application"`
	Initial         int64      `json:"initial"`
	Pending         int64      `json:"pending"`
	Computing       int64      `json:"computing"`
	AwaitingCompute int64      `json:"awaiting_compute"`
	Disabled        int64      `json:"disabled"`
	Failed          int64      `json:"failed"`
	Estimated       bool       `json:"estimated"`         // the counts are estimates
	Serving         int        `json:"serving"`           // live nodes that would claim from it
	Blocked         *string    `json:"blocked,omitempty"` // why no node claims from it: a code of explain
	HeadAgeSeconds  *float64   `json:"head_age_seconds"`
	SampledAt       *time.Time `json:"sampled_at,omitempty"` // of the sample; nil: counted now, or unmeasured
	Unmeasured      bool       `json:"unmeasured,omitempty" doc:"No sample yet: counts are not known."`
	Paused          bool       `json:"paused"`
	PausedBy        string     `json:"paused_by,omitempty"`
	PausedReason    string     `json:"paused_reason,omitempty"`
	PausedUntil     *time.Time `json:"paused_until,omitempty"`
	OutOfService    bool       `json:"out_of_service"`
	Capacity        *int64     `json:"capacity,omitempty"`
	MaxConcurrent   *int32     `json:"max_concurrent,omitempty"`
	QueueID         int32      `json:"queue_id"`
	Accepted        int64      `json:"accepted"` // rows inserted into its table since the statistics began
	Gone            int64      `json:"gone"`     // rows deleted from it
	DeadTuples      int64      `json:"dead_tuples"`
	InPerSecond     *float64   `json:"in_per_second,omitempty"` // of a sample; nil where that is old
	OutPerSecond    *float64   `json:"out_per_second,omitempty"`
}

// queuesSQL reads the first $4 queues behind the name $3 of those named in $1, of all if that is null. Their
// depths come from their newest sample if $2 is true. If that is too old (penstock.last_sample), because no leader
// is elected, it counts them itself, but for more than 100 queues: readers would count without end, so that it
// takes a sample of up to a day, without its rates. It begins counts for a second, and what is left then is
// unmeasured: a count takes milliseconds, and a hundred times that on a busy server, so that a list would not end
// where hundreds of queues are new. One queue alone is always counted, and so are up to ten in all. What operators
// have stopped (penstock.queue_stops) is that of now beside a sample as well. Counts are bounded, see
// penstock.count_queue; inserts and deletes are the statistics collector's, about a second old.
const queuesSQL = `
SELECT q.name, q.kind::text, q.application, s.initial, s.pending, s.computing,
       s.initial + s.pending - s.computing AS awaiting_compute,
       s.disabled, s.failed, s.estimated, s.serving, m.l IS NULL AS unmeasured,
       coalesce((SELECT x.code FROM penstock.queue_stops(q) x LIMIT 1),
                CASE WHEN s.blocked NOT IN ('paused', 'queue_disabled', 'application_paused', 'model_paused')
                     THEN s.blocked END) AS blocked,
       s.head_age AS head_age_seconds, n.at AS sampled_at,
       q.paused_at IS NOT NULL AND penstock.paused_until(q.paused_until) AS paused,
       coalesce(q.paused_by, '') AS paused_by, coalesce(q.paused_reason, '') AS paused_reason,
       penstock.json_time(q.paused_until) AS paused_until,
       q.disabled_at IS NOT NULL AS out_of_service, q.capacity, q.max_concurrent, q.id AS queue_id,
       s.accepted, s.gone, s.dead_tuples, r.in_per_second, r.out_per_second
  FROM penstock.queue q
 CROSS JOIN (SELECT count(*) > 100 AS many, count(*) <= 10 AS few FROM (SELECT FROM penstock.queue LIMIT 101) x) c
 CROSS JOIN LATERAL (SELECT l, (l).at FROM (
       SELECT CASE WHEN $2 THEN penstock.last_sample(q.id, CASE WHEN c.many THEN interval '1 day' END) END AS l
       OFFSET 0) x) n
 CROSS JOIN LATERAL (
       SELECT CASE WHEN n.at IS NOT NULL THEN n.l
              WHEN c.few OR cardinality($1::text[]) = 1
                OR clock_timestamp() < statement_timestamp() + interval '1 second'
              THEN penstock.measure(q) END AS l OFFSET 0) m
 CROSS JOIN LATERAL (
       SELECT (x.l).* FROM (
              SELECT coalesce(m.l, ROW(q.id, NULL, 0, 0, 0, 0, 0, true, 0, NULL, NULL, 0, 0, 0, NULL, NULL
                                      )::penstock.sample) AS l OFFSET 0) x) s
  LEFT JOIN LATERAL (SELECT s.in_per_second, s.out_per_second) r
         ON n.at > statement_timestamp() - interval '30 seconds' OR (penstock.last_sample(q.id)).at IS NOT NULL
 WHERE q.id = ANY (ARRAY(
       SELECT x.id FROM penstock.queue x
        WHERE ($1::text[] IS NULL OR x.name = ANY ($1)) AND x.name > $3
        ORDER BY x.name LIMIT $4))
 ORDER BY q.name`

// Queues returns the queues of these names with their present state; without names all queues, as
// the elected leader sampled them.
func (d *Database) Queues(ctx context.Context, names ...string) ([]Queue, error) {
	if len(names) == 0 {
		names = nil // an empty array would match no queue
	}
	return list[Queue](ctx, d.db, "queues", queuesSQL, names, names == nil, "", nil)
}

// QueuesAfter returns the first queues behind a name, by name, as the elected leader sampled them.
func (d *Database) QueuesAfter(ctx context.Context, after string, limit int) ([]Queue, error) {
	return list[Queue](ctx, d.db, "queues", queuesSQL, nil, true, after, page(limit))
}

// QueueDetail is a queue with its settings, lanes and limits.
type QueueDetail struct {
	Queue
	Settings json.RawMessage `json:"settings"` // as Alter takes them
	Lanes    []Lane          `json:"lanes"`    // up to 20
	Limits   json.RawMessage `json:"limits"`   // units a lock, by limit
	Off      []Off           `json:"disabled_entries"`
}

// Off is a name or lock key whose entries are disabled.
type Off struct {
	Scope     string    `json:"scope" doc:"name or lock_key."`
	Value     string    `json:"value"`
	Actor     string    `json:"actor"`
	Reason    string    `json:"reason"`
	CreatedAt time.Time `json:"created_at"`
}

const settingsSQL = `
SELECT to_jsonb(q) - ARRAY['id', 'name', 'refusal', 'paused_at', 'paused_by', 'paused_reason', 'paused_until',
                           'disabled_at', 'disabled_by', 'disabled_reason', 'version', 'weighed',
                           'created_at'] AS settings,
       coalesce((SELECT jsonb_object_agg(l.name, u.units) FROM penstock.limit_use u
              JOIN penstock."limit" l ON l.id = u.limit_id
                  WHERE u.queue_id = q.id), '{}') AS limits
  FROM penstock.queue q
 WHERE q.name = $1`

// Queue returns one queue, or invalidation.ErrQueueNotFound.
func (d *Database) Queue(ctx context.Context, name string) (QueueDetail, error) {
	found, err := d.Queues(ctx, name)
	if err != nil {
		return QueueDetail{}, err
	}
	if len(found) == 0 {
		return QueueDetail{}, fmt.Errorf("show queue %q: %w", name, invalidation.ErrQueueNotFound)
	}
	detail := QueueDetail{Queue: found[0]}
	if detail.Settings, detail.Limits, err = d.QueueSettings(ctx, name); err != nil {
		return QueueDetail{}, err
	}
	if detail.Lanes, err = d.Lanes(ctx, name, 20); err != nil {
		return QueueDetail{}, err
	}
	const offSQL = `
SELECT scope, value, actor, reason, created_at
  FROM penstock.disabled WHERE queue_id = $1
 ORDER BY scope, value LIMIT 100`
	detail.Off, err = list[Off](ctx, d.db, "disabled entries of queue "+name, offSQL, detail.QueueID)
	return detail, err
}

// QueueSettings returns the settings of a queue as Alter takes them and its units a lock by limit, or
// invalidation.ErrQueueNotFound. It counts nothing.
func (d *Database) QueueSettings(ctx context.Context, name string) (settings, limits json.RawMessage, err error) {
	err = d.db.QueryRow(ctx, settingsSQL, name).Scan(&settings, &limits)
	if errors.Is(err, pgx.ErrNoRows) {
		err = invalidation.ErrQueueNotFound
	}
	if err != nil {
		return nil, nil, fmt.Errorf("show queue %q: %w", name, err)
	}
	return settings, limits, nil
}

// Lane is a lane that has ready rows. Keys counts them up to 1,000.
type Lane struct {
	Queue    string `json:"queue"`
	Priority int16  `json:"priority"` // negative if Throttled
	Flow     string `json:"flow"`
	Keys     int64  `json:"keys"`
	// Throttled is set for the keys of a queue that wait for a token bucket: they are in a lane of their own.
	Throttled bool `json:"throttled,omitempty"`
	// HeadAgeSeconds is how long the first entry of the lane has waited.
	HeadAgeSeconds *float64 `json:"head_age_seconds"`
}

const lanesSQL = `
WITH RECURSIVE lane AS (
    (SELECT q.id, q.name, f.priority, f.flow
       FROM penstock.queue q CROSS JOIN LATERAL (
            SELECT priority, flow FROM penstock.ready WHERE queue_id = q.id ORDER BY priority, flow, pos LIMIT 1) f
      WHERE $1::text IS NULL OR q.name = $1)
    UNION ALL
    SELECT lane.id, lane.name, n.priority, n.flow
      FROM lane CROSS JOIN LATERAL (
           SELECT r.priority, r.flow FROM penstock.ready r
            WHERE r.queue_id = lane.id AND (r.priority, r.flow) > (lane.priority, lane.flow)
            ORDER BY r.priority, r.flow, r.pos LIMIT 1) n
)
SELECT few.name AS queue, few.priority, few.flow, c.keys, few.priority = penstock.throttled_priority() AS throttled,
       extract(epoch FROM clock_timestamp() - e.since)::float8 AS head_age_seconds
  FROM (SELECT * FROM lane LIMIT $2) few
 CROSS JOIN LATERAL (SELECT count(*) AS keys FROM (
       SELECT FROM penstock.ready r WHERE r.queue_id = few.id AND r.priority = few.priority
              AND r.flow = few.flow LIMIT 1000) s) c
  LEFT JOIN LATERAL (
       SELECT r.entry_id, r.lock_key FROM penstock.ready r
        WHERE r.queue_id = few.id AND r.priority = few.priority AND r.flow = few.flow
               ORDER BY r.pos LIMIT 1) first ON true
  LEFT JOIN LATERAL (
       (SELECT greatest(x.created_at, x.due_at) AS since FROM penstock.entry x WHERE x.queue_id = few.id
              AND x.id = first.entry_id)
       UNION ALL
       (SELECT greatest(x.created_at, x.due_at) FROM penstock.entry x
         WHERE x.queue_id = few.id AND x.lock_key = first.lock_key AND penstock.claimable(x.status, x.priority)
                ORDER BY x.id LIMIT 1)) e ON true
 ORDER BY e.since, few.name, few.priority DESC, few.flow`

// Lanes returns lanes that have work, of one queue or of all if it is empty, the longest waiting
// first. It finds limit lanes by a loose index scan and orders those.
func (d *Database) Lanes(ctx context.Context, queue string, limit int) ([]Lane, error) {
	return list[Lane](ctx, d.db, "lanes", lanesSQL, given(queue), page(limit))
}

// CreateQueue makes a queue. Options are named as the columns of penstock.queue.
func (d *Database) CreateQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		if _, err := invalidation.Create(ctx, tx, name, invalidation.Config{}); err != nil {
			return err
		}
		if len(options) > 0 {
			if _, err := invalidation.Alter(ctx, tx, name, options); err != nil {
				return err
			}
		}
		return record(ctx, tx, by, "create_queue", name, options)
	})
}

// AlterQueue changes settings of a queue; a nil value resets a setting.
func (d *Database) AlterQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	err := postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		if _, err := invalidation.Alter(ctx, tx, name, options); err != nil {
			return err
		}
		return record(ctx, tx, by, "alter_queue", name, options)
	})
	return d.waited(ctx, "alter", name, err)
}

// DropQueue removes a queue; with force also one that has entries, which are lost.
func (d *Database) DropQueue(ctx context.Context, name string, force bool, by invalidation.By) error {
	return d.waited(ctx, "drop", name, invalidation.Drop(ctx, d.db, name, force, by))
}

// holdersSQL names the transactions that have the table of queue $1 open.
const holdersSQL = `
SELECT coalesce(string_agg(format('session %s (%s, %s) that has been in a transaction for %s s: '
                                  'SELECT pg_terminate_backend(%s) ends it',
                                  a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no name'),
                                  extract(epoch FROM clock_timestamp() - a.xact_start)::bigint, a.pid), '; '
                                         ORDER BY a.xact_start), $2)
  FROM pg_stat_activity a
 WHERE a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
   AND a.pid IN (SELECT l.pid FROM pg_locks l
                  WHERE l.granted AND l.relation = to_regclass(format('penstock.%I', 'entry_' || $1)))`

// waited names the transactions for which a change of a queue waited until its timeout; other
// errors pass through.
func (d *Database) waited(ctx context.Context, does, queue string, err error) error {
	if code := postgres.Code(err); code != postgres.LockNotAvailable && code != postgres.QueryCanceled {
		return err
	}
	holder := "a transaction that has the queue open, a push or a backup perhaps; penstock doctor names those that last"
	// On a transaction, which has failed by now, no query can run.
	_ = d.db.QueryRow(ctx, holdersSQL, queue, holder).Scan(&holder)
	return fmt.Errorf("%s queue %q: nothing was changed: the wait for %s timed out; try again later: %w", does, queue,
		holder, invalidation.ErrState)
}
