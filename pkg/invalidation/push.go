package invalidation

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Push is an entry to be. Only Payload is needed. In JSON the options have their SQL names, as penstock.push_json reads
// them.
type Push struct {
	Payload  json.RawMessage `json:"payload"`
	LockKey  string          `json:"lock_key,omitzero"` // empty: by the queue's grouping of the payload, else solo
	Flow     string          `json:"flow,omitzero"`     // empty: one of the queue's shards, if it has some
	Priority *int16          `json:"priority,omitzero"` // 0 to 9, higher first; nil for the queue's default
	DueAt    time.Time       `json:"due_at,omitzero"`
	StartBy  time.Time       `json:"start_by,omitzero"`  // not started by then: expired
	FinishBy time.Time       `json:"finish_by,omitzero"` // not finished by then: expired
	Cost     float64         `json:"cost,omitzero"`      // in the units the queue's fairness counts, 0 for unknown
	// Weight is how many times the units of each limit of the queue the entry takes while it runs; 0 for 1. At most
	// Config.MaxWeight.
	Weight int32  `json:"weight,omitzero"`
	Name   string `json:"name,omitzero"` // job name, by which entries can be listed and disabled

	// IdempotencyKey names this push within queue and flow: a second push with the same key,
	// payload, lock key and name gets the first one's entry (other options are not compared); with
	// another of these it is refused with ErrIdempotencyConflict.
	IdempotencyKey string `json:"idempotency_key,omitzero"`
	// UniqueKey and UniquePolicy keep an entry from being queued twice.
	UniqueKey    string       `json:"unique_key,omitzero"`
	UniquePolicy UniquePolicy `json:"unique_policy,omitzero"`

	// Trace is a W3C traceparent; empty: the span of the push, if its context has one.
	Trace string `json:"trace,omitzero"`
	// Callback says where to report the outcome: {"url": "https://...", "context": any JSON, sent along}.
	Callback json.RawMessage `json:"callback,omitzero"`
}

// UniquePolicy says for how long an entry occupies its unique key.
type UniquePolicy string

// The uniqueness policies.
const (
	WhileQueued UniquePolicy = "while_queued" // until a push finds it running
	WhileActive UniquePolicy = "while_active" // until it ends
	// OneRunningOneQueued keeps it until the entry starts; the next one waits for that to end, by a lock key of their
	// own: the policy is refused beside another lock key.
	OneRunningOneQueued UniquePolicy = "one_running_one_queued"
)

// Verdict is the result of one push.
type Verdict string

// The verdicts on a push.
const (
	Inserted  Verdict = "inserted"
	Replayed  Verdict = "replayed"  // the idempotency key was seen before
	Duplicate Verdict = "duplicate" // another entry holds the unique key
)

// Pushed is the answer to one Push: the entry that does the work, new or not.
type Pushed struct {
	ID      EntryID `json:"id"`
	Verdict Verdict `json:"verdict" doc:"inserted, replayed (the idempotency key was seen before) or duplicate (another entry holds the unique key)."`
}

// Push accepts entries, all or none, in one statement. On a pool it commits before it returns, and
// may do so together with pushes of other callers; on a transaction (see WithTx) the entries exist when
// that commits. Answers are in the order of pushes. When ctx ends while Push waits, the entries may
// or may not have been accepted.
func (q *Queue) Push(ctx context.Context, pushes ...Push) ([]Pushed, error) {
	return pushTo(ctx, q.Name, pushes, q.pushBatched)
}

// unusedKeySQL finds the first of pushes with flows $2 and idempotency keys $3 whose key no push to queue $1 has used.
const unusedKeySQL = `
SELECT u.i
  FROM unnest($2::text[], $3::text[]) WITH ORDINALITY u(flow, key, i)
  LEFT JOIN LATERAL (SELECT true AS used FROM penstock.idempotency k
                      WHERE k.queue_id = $1 AND k.flow = u.flow AND k.key = u.key OFFSET 0) k ON true
 WHERE k.used IS NULL
 ORDER BY u.i
 LIMIT 1`

// AcceptedBefore returns how many of pushes, from the first one on, have an idempotency key that an earlier push has
// used: Push answers them with its entry, or with ErrIdempotencyConflict, and inserts nothing.
func (q *Queue) AcceptedBefore(ctx context.Context, pushes ...Push) (int, error) {
	var flows, keys []string
	for _, p := range pushes {
		if p.IdempotencyKey == "" {
			break
		}
		flows, keys = append(flows, p.Flow), append(keys, p.IdempotencyKey)
	}
	if len(keys) == 0 {
		return 0, nil
	}
	var unused int
	err := q.db.QueryRow(ctx, unusedKeySQL, q.ID, flows, keys).Scan(&unused)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return len(keys), nil
	case err != nil:
		return 0, fmt.Errorf("look up idempotency keys of queue %q: %w", q.Name, err)
	}
	return unused - 1, nil
}

// pushedUnderSQL says whether entry $1 was pushed under key $2 of flow $3.
const pushedUnderSQL = `
SELECT EXISTS (SELECT FROM penstock.find_entry($1::bigint) f
                CROSS JOIN LATERAL (SELECT entry_id FROM penstock.idempotency WHERE queue_id = f.queue_id
                       AND flow = $3 AND key = $2 OFFSET 0) k
                WHERE k.entry_id = $1::bigint)`

// PushedUnder reports whether an entry was pushed with this idempotency key in this flow, in whichever queue it is or
// was: the key, which nobody else knows, shows that a client pushed it.
func PushedUnder(ctx context.Context, db postgres.DB, id EntryID, flow, key string) (pushed bool, err error) {
	if err := db.QueryRow(ctx, pushedUnderSQL, id, key, flow).Scan(&pushed); err != nil {
		return false, fmt.Errorf("look for the push of entry %d: %w", id, err)
	}
	return pushed, nil
}

// pushTo pushes by a function, within a span; its errors name the queue.
func pushTo(
	ctx context.Context, queue string, pushes []Push, push func(context.Context, []Push) ([]Pushed, error),
) ([]Pushed, error) {
	ctx, span, pushes := startPush(ctx, queue, pushes)
	defer span.End()
	err := checkNumbers(pushes)
	if err == nil {
		var pushed []Pushed
		if pushed, err = push(ctx, pushes); err == nil {
			return pushed, nil
		}
	}
	return nil, fmt.Errorf("push to queue %q: %w", queue, withDuty(unstorable(err)))
}

// onTx reports whether the queue is bound to a transaction of the caller.
func (q *Queue) onTx() bool {
	_, ok := q.db.(pgx.Tx)
	return ok
}

// pushStatement pushes in one statement: the plain one where that serves, else penstock.push_many. Its errors are those
// of the database.
func (q *Queue) pushStatement(ctx context.Context, pushes []Push) ([]Pushed, error) {
	run := q.hinted(pushes)
	pushed, err := q.pushPlain(ctx, run, pushes)
	if pushed == nil && (err == nil || (postgres.Code(err) == postgres.UndefinedTable && !q.onTx())) {
		return pushMany(ctx, run, q.Name, pushes)
	}
	return pushed, err
}

// query runs a statement and passes its rows on.
type query func(ctx context.Context, sql string, args []any, read func(pgx.Rows) error) error

func queryOn(db postgres.DB) query {
	return func(ctx context.Context, sql string, args []any, read func(pgx.Rows) error) error {
		rows := postgres.Query(ctx, db, sql, args...)
		defer rows.Close()
		return errors.Join(read(rows), rows.Err())
	}
}

// pushPlain pushes entries that use no option. It returns neither answers nor an error where that is not for it.
func (q *Queue) pushPlain(ctx context.Context, run query, pushes []Push) ([]Pushed, error) {
	if len(pushes) == 0 || !plain(pushes) || !q.Config.takesPlain() {
		return nil, nil
	}
	ids := make([]EntryID, 0, len(pushes))
	err := run(ctx, q.sql.plainPush, []any{q.ID, payloads(pushes), storedMax(pushes)}, func(rows pgx.Rows) error {
		ids = ids[:0] // of an attempt whose commit was refused
		var id int64
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error { ids = append(ids, EntryID(id)); return nil })
		return err
	})
	switch {
	case postgres.Code(err) == postgres.UndefinedTable:
		return nil, fmt.Errorf("%w: %w", ErrQueueNotFound, err)
	case err != nil || len(ids) == 0:
		return nil, err
	}
	return answers(ids, nil), nil
}

// pushOn pushes to a queue by its name.
func pushOn(ctx context.Context, db postgres.DB, queue string, pushes []Push) ([]Pushed, error) {
	return pushTo(ctx, queue, pushes, func(ctx context.Context, pushes []Push) ([]Pushed, error) {
		return pushMany(ctx, queryOn(db), queue, pushes)
	})
}

func pushMany(ctx context.Context, run query, queue string, pushes []Push) ([]Pushed, error) {
	var ids []EntryID
	var verdicts []Verdict
	err := run(ctx, pushSQL, pushColumns(queue, pushes), func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&ids, &verdicts}, func() error { return nil })
		return err
	})
	if err != nil {
		return nil, err
	}
	return answers(ids, verdicts), nil
}

// unstorable marks an error about a text or payload that Postgres cannot hold as the caller's.
func unstorable(err error) error {
	if postgres.RefusesValues(err) {
		return fmt.Errorf("%w: %w", err, ErrInvalid)
	}
	return err
}

func answers(ids []EntryID, verdicts []Verdict) []Pushed {
	pushed := make([]Pushed, len(ids))
	for i, id := range ids {
		pushed[i] = Pushed{ID: id, Verdict: Inserted}
		if verdicts != nil {
			pushed[i].Verdict = verdicts[i]
		}
	}
	return pushed
}

// PushSQLTx is Push inside a transaction of database/sql, whatever the driver: the arguments go as one JSON text.
// Errors are those of Push where the driver's errors have a method SQLState, as those of pgx and lib/pq; the hints and
// the numbers of FullError come with pgx alone.
func PushSQLTx(ctx context.Context, tx *sql.Tx, queue string, pushes ...Push) ([]Pushed, error) {
	return pushTo(ctx, queue, pushes, func(ctx context.Context, pushes []Push) (pushed []Pushed, err error) {
		if i := slices.IndexFunc(pushes, func(p Push) bool { return p.Payload == nil }); i >= 0 {
			return nil, fmt.Errorf("payload of entry %d is missing: %w", i+1, ErrInvalid)
		}
		args, err := json.Marshal(append([]Push{}, pushes...)) // none are an empty array
		if err != nil {
			return nil, fmt.Errorf("payload is not JSON: %w: %w", err, ErrInvalid)
		}
		var answer []byte
		err = tx.QueryRowContext(ctx, `SELECT penstock.push_json($1, CAST($2 AS jsonb))`, queue,
			string(args)).Scan(&answer)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(answer, &pushed); err != nil {
			return nil, fmt.Errorf("read the answer: %w", err)
		}
		return pushed, nil
	})
}
