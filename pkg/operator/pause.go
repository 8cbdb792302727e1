package operator

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Pause is a pause: of a queue, or of what is smaller or larger than one.
type Pause struct {
	Scope  string     `json:"scope"` // queue, name, lock_key, flow, model, application, node
	Value  string     `json:"value"`
	Queue  string     `json:"queue,omitempty"` // of a name, a lock key, or a flow of one queue
	Actor  string     `json:"actor"`
	Reason string     `json:"reason"`
	Since  time.Time  `json:"since"`
	Until  *time.Time `json:"until,omitempty"`
}

const pausesSQL = `
SELECT scope, value, queue, actor, reason, since, until FROM (
    SELECT 'queue' AS scope, name AS value, '' AS queue, coalesce(paused_by, '') AS actor, coalesce(paused_reason, '') AS reason,
           paused_at AS since, paused_until AS until
      FROM penstock.queue WHERE paused_at IS NOT NULL
    UNION ALL
    SELECT p.scope, p.value, coalesce(q.name, ''), p.actor, p.reason, p.created_at, p.until
      FROM penstock.pause p LEFT JOIN penstock.queue q ON q.id = p.queue_id) all_pauses
 WHERE coalesce(until > clock_timestamp(), true)
 ORDER BY since, scope, value
 LIMIT $1`

// Pauses returns every pause that lasts, the oldest first.
func (d *Database) Pauses(ctx context.Context, limit int) ([]Pause, error) {
	return list[Pause](ctx, d.db, "pauses", pausesSQL, page(limit))
}

// Pause stops claims of a subject until it is resumed, or until a time that is not zero.
func (d *Database) Pause(ctx context.Context, s invalidation.Subject, by invalidation.By, until time.Time) error {
	return invalidation.Pause(ctx, d.db, s, by, until)
}

// Resume ends a pause.
func (d *Database) Resume(ctx context.Context, s invalidation.Subject, by invalidation.By) error {
	return invalidation.Resume(ctx, d.db, s, by)
}

// Application is a group of queues and nodes, what it uses and may use.
type Application struct {
	Name          string   `json:"name"`
	Queues        int64    `json:"queues"`
	Nodes         int64    `json:"nodes"` // live
	Threads       int64    `json:"threads"`
	Locks         int64    `json:"locks"`
	OldestSeconds *float64 `json:"oldest_lock_seconds,omitempty"`
	QuotaUnits    *int32   `json:"quota_units,omitempty"`
	QuotaRate     *float64 `json:"quota_rate,omitempty"`
	Paused        bool     `json:"paused"`
}

const applicationsSQL = `
SELECT application AS name, queues, nodes, threads, locks, extract(epoch FROM oldest)::float8 AS oldest_seconds, quota_units,
       quota_rate::float8 AS quota_rate, paused
  FROM penstock.application_status
 ORDER BY application
 LIMIT $1`

// Applications returns the applications by name.
func (d *Database) Applications(ctx context.Context, limit int) ([]Application, error) {
	return list[Application](ctx, d.db, "applications", applicationsSQL, page(limit))
}

// SetQuota bounds what an application uses over all its queues; nil removes the bound.
func (d *Database) SetQuota(ctx context.Context, application string, l *invalidation.Limit, by invalidation.By) error {
	return invalidation.SetQuota(ctx, d.db, application, l, by)
}
