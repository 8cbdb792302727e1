package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// EntryStatus is a row of penstock.entry_status.
type EntryStatus struct {
	ID        int64      `json:"id"`
	Queue     string     `json:"queue"`
	State     string     `json:"state" doc:"initial, pending, computing or disabled."`
	LockKey   string     `json:"lock_key,omitempty"`
	Flow      string     `json:"flow,omitempty"`
	Priority  int16      `json:"priority"`
	Weight    int16      `json:"weight"` // times the units of each limit of the queue
	Name      string     `json:"name,omitempty"`
	Attempt   int16      `json:"attempt"`
	Crashes   int16      `json:"crashes"`
	CreatedAt time.Time  `json:"created_at"`
	DueAt     *time.Time `json:"due_at,omitempty"`
	StartBy   *time.Time `json:"start_by,omitempty"`
	FinishBy  *time.Time `json:"finish_by,omitempty"`
	Token     *int64     `json:"token,omitempty"`
	NodeID    *NodeID    `json:"node_id,omitempty"`
	ClaimedAt *time.Time `json:"claimed_at,omitempty"`
}

// EntryFilter chooses entries of one queue; all fields that are set must match.
type EntryFilter struct {
	Queue               string
	State               string // initial, pending, computing, disabled
	Flow, LockKey, Name string
	After               int64 // ids above this one
	Limit               int
}

const entryColumns = `
SELECT s.id, s.queue, s.state, coalesce(s.lock_key, '') AS lock_key, s.flow, s.priority, s.weight,
       coalesce(s.name, '') AS name, s.attempt, s.crashes,
       s.created_at, s.due_at, s.start_by, s.finish_by, s.token, s.node_id, s.claimed_at`

// entriesSQL selects ids through the index of its conditions, and then reads each entry by its id.
const entriesSQL = entryColumns + `
  FROM (SELECT e.id FROM %s AS e WHERE e.queue_id = $1 AND e.id > $2 AND %s ORDER BY e.id LIMIT $3) chosen
  JOIN penstock.entry_status s ON s.queue_id = $1 AND s.id = chosen.id
 ORDER BY s.id`

// runningSQL selects running entries. It starts from the lock records, whose number is that of the
// work in flight.
const runningSQL = `(
        SELECT x.* FROM penstock.lock l JOIN penstock.entry_X x ON x.queue_id = l.queue_id AND x.id = l.last_entry_id
         WHERE l.queue_id = $1 AND penstock.is_solo(l.lock_key)
        UNION ALL
        SELECT x.* FROM penstock.lock l JOIN penstock.entry_X x ON x.queue_id = l.queue_id AND x.lock_key = l.lock_key
           AND x.id <= l.last_entry_id AND penstock.claimable(x.status, x.priority)
         WHERE l.queue_id = $1 AND NOT penstock.is_solo(l.lock_key))`

// ofKeySQL selects the entries of the lock key %[1]s: two indexes have them, that of pending entries and that of the
// others.
const ofKeySQL = `(
        SELECT x.* FROM penstock.entry_X x WHERE x.queue_id = $1 AND x.lock_key = %[1]s AND x.status = 'pending'
               AND x.priority >= 0
        UNION ALL
        SELECT x.* FROM penstock.entry_X x WHERE x.queue_id = $1 AND x.lock_key = %[1]s
               AND (x.status = 'initial' OR x.priority < 0))`

// states are the conditions of the stored and the derived states. They say again what penstock.entry_state computes,
// worded as the partial indexes are, which serve no condition on the result of a function;
// TestEntriesAreFoundByEachState compares the two.
var states = map[string]string{
	"":          "true",
	"initial":   "e.status = 'initial' AND e.priority >= 0",
	"pending":   "penstock.claimable(e.status, e.priority) AND NOT penstock.runs(ROW(e.*)::penstock.entry)",
	"computing": "penstock.claimable(e.status, e.priority)",
	"disabled":  "e.priority = -1",
}

// States lists the states that Entries takes.
func States() []string { return []string{"initial", "pending", "computing", "disabled"} }

// Entries returns entries of a queue, oldest first.
func (d *Database) Entries(ctx context.Context, f EntryFilter) ([]EntryStatus, error) {
	if _, known := states[f.State]; !known {
		return nil, fmt.Errorf("list entries of queue %q: state %q is not one of initial, pending, computing, "+
			"disabled: %w",
			f.Queue, f.State, invalidation.ErrInvalid)
	}
	id, err := d.queueID(ctx, f.Queue)
	if err != nil {
		return nil, err
	}
	sql, values := f.statement()
	args := append([]any{id, f.After, page(f.Limit)}, values...)
	return list[EntryStatus](ctx, d.db, "entries of queue "+f.Queue, sql, args...)
}

// statement returns the query of the filter and the values of its parameters from $4 on. The text
// is built only from constants of this file and parameter numbers.
func (f EntryFilter) statement() (sql string, values []any) {
	condition := states[f.State]
	parameter := func(value string) string {
		values = append(values, value)
		return "$" + strconv.Itoa(3+len(values))
	}
	source := "penstock.entry_X"
	switch {
	case f.State == "computing":
		source = runningSQL
	case f.LockKey != "":
		source = fmt.Sprintf(ofKeySQL, parameter(f.LockKey))
	}
	for _, c := range []struct{ column, value string }{{"flow", f.Flow}, {"lock_key", f.LockKey}, {"name", f.Name}} {
		if c.value != "" {
			condition += " AND e." + c.column + " = " + parameter(c.value)
		}
	}
	// The statement names the queue's own table: on the partitioned table penstock.entry the
	// planner would sort rows that an index of the queue's table returns in order.
	return invalidation.OnTable(f.Queue, fmt.Sprintf(entriesSQL, source, condition)), values
}

func (d *Database) queueID(ctx context.Context, name string) (int32, error) {
	var id int32
	err := d.db.QueryRow(ctx, `SELECT id FROM penstock.queue WHERE name = $1`, name).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = invalidation.ErrQueueNotFound
	}
	if err != nil {
		return 0, fmt.Errorf("find queue %q: %w", name, err)
	}
	return id, nil
}

// EntryDetail is the full state of one entry, before or after its end.
type EntryDetail struct {
	ID      int64           `json:"id"`
	Queue   string          `json:"queue"`
	State   string          `json:"state"`           // that of EntryStatus, or an outcome
	Entry   *EntryStatus    `json:"entry,omitempty"` // until it ends
	Payload json.RawMessage `json:"payload,omitempty"`
	History json.RawMessage `json:"history,omitempty"` // errors of earlier attempts, oldest first
	Trace   string          `json:"trace,omitempty"`
	// Progress is the last progress report of a run: done (0 to 1), message, updated_at.
	Progress json.RawMessage `json:"progress,omitempty"`
	Ended    *EntryOutcome   `json:"ended,omitempty"`
}

// EntryOutcome is the outcome of an entry as operators see it.
type EntryOutcome struct {
	Outcome    string          `json:"outcome"` // done, failed, expired, cancelled
	At         time.Time       `json:"at"`
	Accepted   time.Time       `json:"accepted"`
	Attempt    int             `json:"attempt"`
	NodeID     NodeID          `json:"node_id,omitempty"`
	Token      int64           `json:"token,omitempty"`
	RunSeconds float64         `json:"run_seconds,omitempty"`
	Class      string          `json:"class,omitempty"`
	Reason     string          `json:"reason,omitempty"`
	Result     json.RawMessage `json:"result,omitempty"`
}

const livingSQL = entryColumns + `
  FROM penstock.find_entry($1) f
  JOIN penstock.entry_status s ON s.queue_id = f.queue_id AND s.id = $1`

const bodySQL = `
SELECT e.payload, e.history, coalesce(e.trace, ''),
       (SELECT jsonb_strip_nulls(jsonb_build_object('done', p.done, 'message', p.message, 'updated_at', p.updated_at))
          FROM penstock.progress p WHERE p.queue_id = e.queue_id AND p.entry_id = e.id)
  FROM penstock.queue q JOIN penstock.entry e ON e.queue_id = q.id
 WHERE q.name = $1 AND e.id = $2`

// Entry returns one entry, or its outcome. It returns invalidation.ErrEntryNotFound if there is
// neither.
func (d *Database) Entry(ctx context.Context, id int64) (EntryDetail, error) {
	// It may end between two statements, and return to its queue when its failure is retried: read
	// again.
	for range 3 {
		found, err := list[EntryStatus](ctx, d.db, "entry "+strconv.FormatInt(id, 10), livingSQL, id)
		if err != nil {
			return EntryDetail{}, err
		}
		if len(found) > 0 {
			e := found[0]
			detail := EntryDetail{ID: id, Queue: e.Queue, State: e.State, Entry: &e}
			err := d.db.QueryRow(ctx, bodySQL, e.Queue, id).Scan(&detail.Payload, &detail.History, &detail.Trace,
				&detail.Progress)
			if !errors.Is(err, pgx.ErrNoRows) {
				return detail, err
			}
		}
		queue, ended, err := d.Outcome(ctx, id)
		if !errors.Is(err, invalidation.ErrState) {
			return EntryDetail{ID: id, Queue: queue, State: ended.Outcome, Ended: &ended}, err
		}
	}
	return EntryDetail{}, fmt.Errorf("show entry %d: it changes faster than it can be read; try again: %w",
		id, invalidation.ErrState)
}

// Outcome returns the queue and the outcome of an entry. It returns invalidation.ErrState if it has
// not ended.
func (d *Database) Outcome(ctx context.Context, id int64) (string, EntryOutcome, error) {
	o, err := invalidation.Outcome(ctx, d.db, invalidation.EntryID(id))
	return o.Queue, EntryOutcome{
		Outcome: o.Outcome, At: o.At, Accepted: o.Accepted, Attempt: o.Attempt, NodeID: NodeID(o.Node),
		Token:      int64(o.Token),
		RunSeconds: o.Ran.Seconds(), Class: o.Class, Reason: o.Reason, Result: o.Result,
	}, err
}

// Push accepts entries, all or none.
func (d *Database) Push(ctx context.Context, queue string, pushes ...invalidation.Push) ([]invalidation.Pushed, error) {
	q, err := invalidation.Open(ctx, d.db, queue)
	if err != nil {
		return nil, err
	}
	return q.Push(ctx, pushes...)
}

// Cancelled is the result of CancelEntry.
type Cancelled string

// The results of CancelEntry.
const (
	CancelDone      Cancelled = "cancelled" // it has ended
	CancelRequested Cancelled = "requested" // a node runs it, or has claimed it, and will cancel it
)

// CancelEntry ends an entry, or requests it from the node that runs it. It returns
// invalidation.ErrEntryNotFound if there is no such entry, invalidation.ErrState if it has ended,
// with the outcome in the message.
func (d *Database) CancelEntry(ctx context.Context, id int64, by invalidation.By) (Cancelled, error) {
	const sql = `SELECT penstock.cancel_entry($1, $2, coalesce($3, current_user::text))`
	var answer Cancelled
	if err := d.db.QueryRow(ctx, sql, id, by.Reason, given(by.Actor)).Scan(&answer); err != nil {
		return "", fmt.Errorf("cancel entry %d: %w", id, invalidation.Translate(err))
	}
	return answer, nil
}
