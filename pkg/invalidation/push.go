package invalidation

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
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
	Verdict Verdict `json:"verdict"`
}

// pushSQL calls penstock.push_many, which has the rules of a push. plainPushSQL repeats its plain branch: change
// both together.
const pushSQL = `
SELECT ids, verdicts
  FROM penstock.push_many($1, $2::jsonb[], $3::text[], $4::text[], $5::smallint[], $6::timestamptz[], $7::timestamptz[],
       $8::timestamptz[], $9::real[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::jsonb[],
       weights => $16::int[])`

// plainPushSQL pushes payloads $2 with no option to queue $1, where the queue asks for none either and takes
// payloads of $3 bytes, which no payload exceeds: the plain branch of penstock.push_many, with the queue's
// own table written out, which saves finding it. It returns the ids in the order of the payloads. It returns
// none, and has done nothing, where anything else is to be done or said; push_many does and says it. Payloads
// are unnested but once, and not measured: the push of a single one takes a sixth longer otherwise.
const plainPushSQL = `
WITH fresh AS (
    INSERT INTO penstock.entry_X (id, queue_id, status, priority, payload)
    SELECT nextval('penstock.entry_id_seq'), $1, 'pending', q.entry_priority, q.payload
      FROM (SELECT entry_priority, unnest($2::jsonb[]) AS payload
              FROM penstock.queue
             WHERE id = $1 AND penstock.takes_plain(queue) AND refusal IS NULL
               AND payload_limit >= $3::integer OFFSET 0) q
    RETURNING id, priority
)
INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
SELECT $1, priority, '', id, id FROM fresh
RETURNING entry_id`

// Push accepts entries, all or none, in one statement. On a pool it commits before it returns, and
// may do so together with pushes of other callers; on a transaction (see WithTx) the entries exist when
// that commits. Answers are in the order of pushes. When ctx ends while Push waits, the entries may
// or may not have been accepted.
func (q *Queue) Push(ctx context.Context, pushes ...Push) ([]Pushed, error) {
	ctx, span, pushes := startPush(ctx, q.Name, pushes)
	defer span.End()
	if err := checkNumbers(pushes); err != nil {
		return nil, q.errorf("push to", err)
	}
	pushed, err := q.pushBatched(ctx, pushes)
	if err != nil {
		return nil, q.errorf("push to", unstorable(err))
	}
	return pushed, nil
}

// onTx reports whether the queue is bound to a transaction of the caller.
func (q *Queue) onTx() bool {
	_, ok := q.db.(pgx.Tx)
	return ok
}

// pushStatement pushes in one statement: the plain one where that serves, else penstock.push_many. lone says that no
// other push of the queue is under way in this process. Its errors are those of the database.
func (q *Queue) pushStatement(ctx context.Context, pushes []Push, lone bool) ([]Pushed, error) {
	run := q.hinted(pushes, lone)
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

// hinted runs the statement of these pushes and, outside a transaction, hints at them: in the transaction of
// a lone push, so that nodes hear of the entries when they are committed, and else through the Hinter.
func (q *Queue) hinted(pushes []Push, lone bool) query {
	if q.hinter == nil || q.onTx() {
		return queryOn(q.db)
	}
	return func(ctx context.Context, sql string, args []any, read func(pgx.Rows) error) error {
		lanes := q.lanes(pushes)
		if lone {
			sent, err := q.pushWithHints(ctx, lanes, sql, args, read)
			if sent || err != nil {
				return err
			}
		}
		err := queryOn(q.db)(ctx, sql, args, read)
		if err == nil {
			q.hinter.hint(q.ID, lanes)
		}
		return err
	}
}

// pushWithHints runs the statement of a push together with hints. sent is false where it must be run without.
func (q *Queue) pushWithHints(
	ctx context.Context, lanes []Lane, sql string, args []any, read func(pgx.Rows) error,
) (sent bool, err error) {
	hints, ended := q.hinter.carry(q.ID, lanes)
	if hints == nil {
		return false, nil
	}
	defer func() { ended(sent) }()
	batch := &pgx.Batch{}
	batch.Queue(sql, args...).Query(read)
	batch.Queue(notifySQL, hints)
	err = q.db.SendBatch(ctx, batch).Close()
	if postgres.Code(err) == notificationsFull {
		q.hinter.stopCarrying()
		return false, nil
	}
	return err == nil, err
}

// notificationsFull is the SQLSTATE of a commit that finds the queue of notifications full.
const notificationsFull = "54000"

// takesPlain reports whether the plain push is worth an attempt. The rule is that of penstock.takes_plain, which the
// statement asks: this saves a queue that it will refuse the round trip.
func (c *Config) takesPlain() bool {
	return c.Grouping == "" && !c.CountsDepth() && c.CapacityPerFlow == 0 && c.OnNoInstance != OnNoInstanceFail &&
		c.Shards <= 1 && c.StartWithin == 0 && c.FinishWithin == 0 && !c.Kind.ours()
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

// storedMax is a number of bytes that the payload of no push exceeds as jsonb. In jsonb a value has at most
// six times the bytes of its text: a digit and a comma become a header of 4 bytes and a number of 8.
func storedMax(pushes []Push) int {
	longest := 0
	for i := range pushes {
		longest = max(longest, len(pushes[i].Payload))
	}
	return min(6*longest+64, math.MaxInt32)
}

// plain says that each push has a payload, and none uses an option.
func plain(pushes []Push) bool {
	return !slices.ContainsFunc(pushes, func(p Push) bool {
		return p.Payload == nil || p.LockKey != "" || p.Flow != "" || p.Priority != nil || !p.DueAt.IsZero() ||
			!p.StartBy.IsZero() ||
			!p.FinishBy.IsZero() || p.Cost != 0 || p.Weight != 0 || p.Name != "" ||
			p.IdempotencyKey != "" || p.UniqueKey != "" ||
			p.UniquePolicy != "" || p.Trace != "" || p.Callback != nil
	})
}

// lanes are where nodes find the entries of pushes, as far as the queue is known here; nil if a push leaves it open.
func (q *Queue) lanes(pushes []Push) []Lane {
	var lanes []Lane
	for i := range pushes {
		p := &pushes[i]
		if !p.DueAt.IsZero() || p.Flow == "" && q.Config.Shards > 1 {
			return nil
		}
		l := Lane{Priority: int16(q.Config.EntryPriority), Flow: p.Flow}
		if p.Priority != nil {
			l.Priority = *p.Priority
		}
		if n := len(lanes); n == 0 || lanes[n-1] != l {
			if n == hintLanes {
				return nil
			}
			lanes = append(lanes, l)
		}
	}
	return lanes
}

func payloads(pushes []Push) []json.RawMessage {
	list := make([]json.RawMessage, len(pushes))
	for i := range pushes {
		list[i] = pushes[i].Payload
	}
	return list
}

// pushOn pushes to a queue by its name.
func pushOn(ctx context.Context, db postgres.DB, queue string, pushes []Push) ([]Pushed, error) {
	ctx, span, pushes := startPush(ctx, queue, pushes)
	defer span.End()
	if err := checkNumbers(pushes); err != nil {
		return nil, fmt.Errorf("push to queue %q: %w", queue, err)
	}
	pushed, err := pushMany(ctx, queryOn(db), queue, pushes)
	if err != nil {
		return nil, fmt.Errorf("push to queue %q: %w", queue, unstorable(withDuty(err)))
	}
	return pushed, nil
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

// unstorable marks an error about a text or payload that Postgres cannot hold (class 22) as the caller's.
func unstorable(err error) error {
	if strings.HasPrefix(postgres.Code(err), "22") {
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

// pushColumns lays the pushes out as one array an option; an option that no push uses stays an empty array.
func pushColumns(queue string, pushes []Push) []any {
	return []any{
		queue, payloads(pushes),
		column(pushes, func(p *Push) *string { return postgres.Given(p.LockKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Flow) }),
		column(pushes, func(p *Push) *int16 { return p.Priority }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.DueAt) }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.StartBy) }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.FinishBy) }),
		column(pushes, func(p *Push) *float64 { return postgres.Given(p.Cost) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Name) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.IdempotencyKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.UniqueKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(string(p.UniquePolicy)) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Trace) }),
		column(pushes, func(p *Push) *json.RawMessage {
			if p.Callback == nil {
				return nil
			}
			return &p.Callback
		}),
		column(pushes, func(p *Push) *int32 { return postgres.Given(p.Weight) }),
	}
}

// column is one option of all pushes, up to the last push that uses it.
func column[T any](pushes []Push, option func(*Push) *T) []*T {
	values := []*T{}
	for i := range pushes {
		if v := option(&pushes[i]); v != nil {
			values = append(append(values, make([]*T, i-len(values))...), v)
		}
	}
	return values
}

func givenTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// PushSQLTx is Push inside a transaction of database/sql, whatever the driver: the arguments go as one JSON text.
func PushSQLTx(ctx context.Context, tx *sql.Tx, queue string, pushes ...Push) ([]Pushed, error) {
	ctx, span, pushes := startPush(ctx, queue, pushes)
	defer span.End()
	if err := checkNumbers(pushes); err != nil {
		return nil, fmt.Errorf("push to queue %q: %w", queue, err)
	}
	args, err := json.Marshal(append([]Push{}, pushes...)) // none are an empty array
	if err != nil {
		return nil, fmt.Errorf("push to queue %q: payload is not JSON: %w: %w", queue, err, ErrInvalid)
	}
	var answer []byte
	err = tx.QueryRowContext(ctx, `SELECT penstock.push_json($1, CAST($2 AS jsonb))`, queue, string(args)).Scan(&answer)
	if err != nil {
		return nil, fmt.Errorf("push to queue %q: %w", queue, unstorable(withDuty(err)))
	}
	var pushed []Pushed
	if err := json.Unmarshal(answer, &pushed); err != nil {
		return nil, errors.Join(errors.New("read answer to push"), err)
	}
	return pushed, nil
}
