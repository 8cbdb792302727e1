package prediction

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// row is a prediction with what is known of its entry.
type row struct {
	ID, Owner string
	Entry     int64
	Queue     int32
	Model     string
	Version   string
	Input     json.RawMessage
	StreamKey *string
	Webhook   *string
	Events    []string
	Deadline  *time.Time
	Created   time.Time
	State     string // waiting, running, or an outcome
	Reason    string
	Result    json.RawMessage
	ClaimedAt *time.Time
	EndedAt   *time.Time
	RanMS     *int64
	RunsChat  bool // the answer is read as one of the OpenAI protocol
}

// rowSQL reads predictions with the state of their entries. One of which neither an outcome nor the entry is there
// any more is not known. Postgres inlines outcome_of: the outcomes of one queue are read.
const rowSQL = `
SELECT p.id, p.owner, p.entry_id, p.queue_id, p.model, p.version, p.input, p.stream_key, p.webhook, p.events,
       p.deadline, p.created_at, s.state, s.reason, s.result, s.claimed_at, s.ended_at, s.run_ms,
       coalesce((SELECT m.config || coalesce(m.override, '{}')
                   FROM penstock.model m WHERE m.name = p.model)->>'protocol' = 'openai', false)
  FROM penstock.prediction p
  JOIN penstock.queue q ON q.id = p.queue_id
 CROSS JOIN LATERAL (
       SELECT o.outcome::text AS state, coalesce(o.reason, '') AS reason, o.result,
              NULL::timestamptz AS claimed_at, o.ended_at, o.run_ms
         FROM penstock.outcome_of(p.entry_id) o WHERE o.queue = q.name
       UNION ALL
       SELECT CASE WHEN l.token IS NULL THEN 'waiting' ELSE 'running' END, '', NULL, l.claimed_at, NULL, NULL
         FROM penstock.entry e
         LEFT JOIN penstock.lock l
           ON l.queue_id = e.queue_id AND l.lock_key = penstock.record_key(e.lock_key, e.id) AND l.last_entry_id >= e.id
        WHERE e.queue_id = p.queue_id AND e.id = p.entry_id
       LIMIT 1) s`

// The statements of requests are bounded, as those of a gateway.QueuePusher are. insert has that bound between BEGIN
// and COMMIT, which have one of their own each.

// errNone says that a prediction does not exist, or belongs to another client.
var errNone = errors.New("no such prediction")

const oneSQL = rowSQL + ` WHERE p.id = $1 AND p.owner = $2`

func find(ctx context.Context, db postgres.DB, owner, id string) (row, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	return one(postgres.Query(ctx, db, oneSQL, id, owner))
}

const byKeySQL = rowSQL + ` WHERE p.id = $1 AND p.stream_key = $2`

// findStream finds a prediction by the key of its stream.
func findStream(ctx context.Context, db postgres.DB, id, key string) (row, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	return one(postgres.Query(ctx, db, byKeySQL, id, key))
}

func one(rows pgx.Rows) (row, error) { return postgres.One[row](rows, "read prediction", errNone) }

// listed is a prediction of a list that is still to be read.
type listed struct {
	ID      string
	Created time.Time
	Stored  int // bytes that input and result take in the database
}

const listedSQL = `
SELECT p.id, p.created_at, pg_column_size(p.input) + coalesce((
       SELECT pg_column_size(r.result) FROM penstock.result r
        WHERE r.queue_id = p.queue_id AND r.entry_id = p.entry_id), 0)
  FROM penstock.prediction p
  JOIN penstock.queue q ON q.id = p.queue_id
 WHERE p.owner = $1 AND (p.created_at, p.id) < ($2::timestamptz, $3)
   AND (EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id)
        OR EXISTS (SELECT FROM penstock.outcome_of(p.entry_id) o WHERE o.queue = q.name))
 ORDER BY p.created_at DESC, p.id DESC
 LIMIT $4`

const pageSQL = rowSQL + ` WHERE p.id = ANY($1) ORDER BY p.created_at DESC, p.id DESC`

// pageBytesMax is how many bytes, as they are stored, the predictions of a page have, but for the first of them.
const pageBytesMax = 4 << 20

// fitting returns how many predictions are in a page.
func fitting(list []listed) int {
	stored := 0
	for i, l := range list {
		if stored += l.Stored; stored > pageBytesMax {
			return max(i, 1)
		}
	}
	return len(list)
}

// errCursor refuses a cursor that is not that of a list, or whose prediction is gone and its time not told.
var errCursor = errors.New("cursor is not that of a list: begin the list anew")

// cursor is the prediction behind which a page of a list begins; without an ID, it is before all. Before is when that
// was created: with it, the prediction need not be kept until then. Gateways of versions before give and take the ID
// alone.
type cursor struct{ ID, Before string }

const createdSQL = `SELECT p.created_at FROM penstock.prediction p WHERE p.id = $1 AND p.owner = $2`

// created returns when the prediction of a cursor was created.
func (c cursor) created(ctx context.Context, db postgres.DB, owner string) (at time.Time, err error) {
	switch {
	case c == cursor{}:
		return time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC), nil
	case c.ID == "":
		return at, errCursor
	case c.Before != "":
		if at, err = time.Parse(time.RFC3339Nano, c.Before); err != nil {
			return at, errCursor
		}
		return at, nil
	}
	err = db.QueryRow(ctx, createdSQL, c.ID, owner).Scan(&at)
	if errors.Is(err, pgx.ErrNoRows) {
		return at, errCursor
	}
	if err != nil {
		return at, fmt.Errorf("find prediction of a cursor: %w", err)
	}
	return at, nil
}

// page returns up to limit predictions behind a cursor, the newest first. next is the cursor of the next page; without
// an ID, this is the last. The error is errCursor where the cursor is none.
func page(
	ctx context.Context, db postgres.DB, owner string, behind cursor, limit int,
) (rows []row, next cursor, err error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	created, err := behind.created(ctx, db, owner)
	if err != nil {
		return nil, next, err
	}
	found := postgres.Query(ctx, db, listedSQL, owner, created, behind.ID, limit+1)
	list, err := pgx.CollectRows(found, pgx.RowToStructByPos[listed])
	if err != nil {
		return nil, next, fmt.Errorf("list predictions: %w", err)
	}
	n := min(fitting(list), limit)
	ids := make([]string, n)
	for i := range ids {
		ids[i] = list[i].ID
	}
	if n < len(list) {
		last := list[n-1]
		next = cursor{last.ID, last.Created.UTC().Format(time.RFC3339Nano)}
	}
	rows, err = pgx.CollectRows(postgres.Query(ctx, db, pageSQL, ids), pgx.RowToStructByPos[row])
	if err != nil {
		return nil, next, fmt.Errorf("read predictions of a list: %w", err)
	}
	return rows, next, nil
}

// order is a prediction to be.
type order struct {
	Owner, Flow, Model, Version, Queue string
	Input                              json.RawMessage
	Payload                            json.RawMessage
	Webhook                            string
	Events                             []string
	CancelAfter                        time.Duration // 0: never
	base                               string        // of addresses
}

const insertSQL = `
INSERT INTO penstock.prediction
       (id, owner, entry_id, queue_id, model, version, input, stream_key, webhook, events, deadline, notified_at)
SELECT $1, $2, $3, q.id, $4, $5, $6, $7, $8, $9, $10, CASE WHEN $11 THEN NULL ELSE clock_timestamp() END
  FROM penstock.queue q WHERE q.name = $12`

// deadlineSQL is a deadline by the clock by which entries expire.
const deadlineSQL = `SELECT clock_timestamp() + $1::interval`

// insert makes the prediction and its entry in one transaction, and returns the id of the prediction, and the queue of
// the entry.
func insert(ctx context.Context, db postgres.DB, o order) (id string, queue int32, err error) {
	id = strings.ToLower(secret()[:26])
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		ctx, cancel := postgres.Bounded(ctx)
		defer cancel()
		q, err := invalidation.Open(ctx, tx, o.Queue)
		if err != nil {
			return err
		}
		queue = q.ID
		ask := invalidation.Push{Payload: o.Payload, Flow: o.Flow, Name: "prediction"}
		if o.CancelAfter > 0 {
			if err := tx.QueryRow(ctx, deadlineSQL, o.CancelAfter).Scan(&ask.FinishBy); err != nil {
				return fmt.Errorf("read deadline of prediction: %w", err)
			}
		}
		pushed, err := q.WithTx(tx).Push(ctx, ask)
		if err != nil {
			return err
		}
		var deadline any
		if o.CancelAfter > 0 {
			deadline = ask.FinishBy
		}
		_, err = tx.Exec(ctx, insertSQL, id, o.Owner, int64(pushed[0].ID), o.Model, o.Version, o.Input, secret(),
			postgres.Given(o.Webhook), o.Events, deadline, notifies(o.Events, eventCompleted), o.Queue)
		if err != nil {
			return fmt.Errorf("insert prediction: %w", err)
		}
		if o.Webhook == "" || !notifies(o.Events, eventStart) {
			return nil
		}
		p, err := find(ctx, tx, o.Owner, id)
		if err != nil {
			return err
		}
		return push(ctx, tx, p, eventStart, o.base)
	})
	return id, queue, err
}

// secret returns 160 random bits as 32 characters.
func secret() string {
	var b [20]byte
	_, _ = rand.Read(b[:]) // never fails
	return base32.StdEncoding.EncodeToString(b[:])
}

const cancelSQL = `SELECT penstock.cancel_entry($1, 'prediction was cancelled by its client', $2)`

// cancel requests the end of the entry of a prediction. One that has ended stays as it is.
func cancel(ctx context.Context, db postgres.DB, p row) error {
	ctx, end := postgres.Bounded(ctx)
	defer end()
	_, err := db.Exec(ctx, cancelSQL, p.Entry, "token:"+p.Owner)
	if code := postgres.Code(err); err == nil || code == "PS006" || code == "PS007" {
		return nil
	}
	return fmt.Errorf("cancel prediction %s: %w", p.ID, err)
}
