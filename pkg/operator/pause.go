package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Pause is a pause of a queue or of another scope.
type Pause struct {
	Scope  string     `json:"scope" doc:"queue, name, lock_key, flow, model, application or node."`
	Value  string     `json:"value"`
	Queue  string     `json:"queue,omitempty"` // of a name, a lock key, or a flow of one queue
	Actor  string     `json:"actor"`
	Reason string     `json:"reason"`
	Since  time.Time  `json:"since"`
	Until  *time.Time `json:"until,omitempty"`
}

// Replaced is a pause that was in force when another one replaced it.
type Replaced struct {
	Actor  string     `json:"actor"`
	Reason string     `json:"reason"`
	Since  time.Time  `json:"since"`
	Until  *time.Time `json:"until,omitempty" doc:"Absent: it had no end."`
}

// reasonShown is how many characters of its reason the text of a pause has at most.
const reasonShown = 120

// String says in one line which pause it was: the pause by ann (a migration) until 2026-11-30T10:00:00Z.
func (r *Replaced) String() string {
	s := "the pause by " + oneline.Of(r.Actor)
	if r.Reason != "" {
		s += " (" + oneline.Short(r.Reason, reasonShown) + ")"
	}
	if r.Until != nil {
		return s + " until " + r.Until.UTC().Format(time.RFC3339)
	}
	return s + " without an end"
}

// pausing is change for functions that pause: they return the pause that they replaced.
func (d *Database) pausing(ctx context.Context, does, sql string, by invalidation.By, rest ...any) (*Replaced, error) {
	var replaced *Replaced
	row := d.db.QueryRow(ctx, sql, append([]any{by.Reason, given(by.Actor)}, rest...)...)
	if err := row.Scan(&replaced); err != nil {
		return nil, fmt.Errorf("%s: %w", does, invalidation.Translate(err))
	}
	return replaced, nil
}

// PauseKey is the position of a Pause in the list.
type PauseKey struct {
	Since               time.Time
	Scope, Value, Queue string
}

// PauseFilter chooses pauses.
type PauseFilter struct {
	Queue string   // of it, its names, lock keys and flows; empty: all
	After PauseKey // the last row of the page before
	Limit int
}

const pausesSQL = `
SELECT scope, value, queue, actor, reason, since, penstock.json_time(until) AS until FROM (
    SELECT 'queue' AS scope, name AS value, '' AS queue, coalesce(paused_by, '') AS actor,
           coalesce(paused_reason, '') AS reason,
           paused_at AS since, paused_until AS until
      FROM penstock.queue WHERE paused_at IS NOT NULL
    UNION ALL
    SELECT p.scope, p.value, coalesce(q.name, ''), p.actor, p.reason, p.created_at, p.until
      FROM penstock.pause p LEFT JOIN penstock.queue q ON q.id = p.queue_id) all_pauses
 WHERE penstock.paused_until(until) AND (since, scope, value, queue) > ($1, $2, $3, $4)
   AND ($5::text IS NULL OR queue = $5 OR scope = 'queue' AND value = $5)
 ORDER BY since, scope, value, queue
 LIMIT $6`

// Pauses returns the pauses in effect, the oldest first.
func (d *Database) Pauses(ctx context.Context, f PauseFilter) ([]Pause, error) {
	return list[Pause](ctx, d.db, "pauses", pausesSQL, f.After.Since, f.After.Scope, f.After.Value, f.After.Queue,
		given(f.Queue), page(f.Limit))
}

// Scope is the attribute by which entries are paused or disabled together.
type Scope string

// The scopes. A name and a lock key are of one queue.
const (
	ByName        Scope = "name"
	ByLockKey     Scope = "lock_key"
	ByFlow        Scope = "flow"        // of one queue or of all
	ByModel       Scope = "model"       // queues of the model
	ByApplication Scope = "application" // queues of the application
	ByNode        Scope = "node"        // a node, by name or id
)

// Scopes are all scopes, in the order in which they are offered.
func Scopes() []string {
	return []string{
		string(ByFlow), string(ByName), string(ByLockKey), string(ByModel), string(ByApplication), string(ByNode),
	}
}

// Subject is the object of a pause other than a whole queue, for which there is PauseQueue. Queue is required for names
// and lock keys, and may be given for a flow.
type Subject struct {
	Scope Scope
	Value string
	Queue string
}

func (s Subject) String() string { return fmt.Sprintf("%s %q", s.Scope, s.Value) }

// Pause stops claims of a subject until it is resumed, or until a time to come if that is not zero. Runs go on. Every
// node applies it within one heartbeat. It returns the pause of the subject that was in force before and is replaced,
// nil if there was none.
func (d *Database) Pause(ctx context.Context, s Subject, by invalidation.By, until time.Time) (*Replaced, error) {
	const sql = `SELECT penstock.pause($3, $4, $5, $1, coalesce($2, current_user::text), $6)`
	return d.pausing(ctx, "pause "+s.String(), sql, by, s.Scope, s.Value, given(s.Queue), given(until))
}

// Resume ends a pause. invalidation.ErrState means that the subject is not paused.
func (d *Database) Resume(ctx context.Context, s Subject, by invalidation.By) error {
	const sql = `SELECT penstock.resume($3, $4, $5, $1, coalesce($2, current_user::text))`
	return d.change(ctx, "resume "+s.String(), sql, by, s.Scope, s.Value, given(s.Queue))
}

// Application is a group of queues and nodes, with its usage and quota.
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
SELECT application AS name, queues, nodes, threads, locks, extract(epoch FROM oldest)::float8 AS oldest_seconds,
       quota_units,
       quota_rate::float8 AS quota_rate, paused
  FROM penstock.application_status
 WHERE application > $1
 ORDER BY application
 LIMIT $2`

// Applications returns the applications by name, from the first behind the given one.
func (d *Database) Applications(ctx context.Context, after string, limit int) ([]Application, error) {
	return list[Application](ctx, d.db, "applications", applicationsSQL, after, page(limit))
}

// Quota bounds the locks of an application over all its queues. At least MaxUnits or Rate is set.
type Quota struct {
	MaxUnits *int    `json:"max_units,omitempty"` // locks at once
	Rate     float64 `json:"rate,omitempty"`      // locks a second
	Burst    float64 `json:"burst,omitempty"`     // locks that may be saved up; a second's worth if zero
}

// SetQuota bounds the locks of an application over all its queues, later ones included; nil removes
// the quota.
func (d *Database) SetQuota(ctx context.Context, application string, q *Quota, by invalidation.By) error {
	const sql = `SELECT penstock.set_quota($3, $4, $1, coalesce($2, current_user::text))`
	return d.change(ctx, "set quota of application "+application, sql, by, application, q)
}
