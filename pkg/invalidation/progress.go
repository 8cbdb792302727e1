package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// progressSQL writes the progress of entry $2 while its lock record still carries token $4. It
// locks the record FOR KEY SHARE, so that the entry cannot be given to another run before this
// commits. Null parameters change nothing.
const progressSQL = `
INSERT INTO penstock.progress AS p (queue_id, entry_id, token, done, message, checkpoint)
SELECT $1, $2, $4, $5::real, $6::text, $7::jsonb
  FROM (SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = $3 AND token = $4 FOR KEY SHARE) mine
ON CONFLICT (queue_id, entry_id) DO UPDATE
   SET token = excluded.token, updated_at = clock_timestamp(), done = coalesce(excluded.done, p.done),
       message = coalesce(excluded.message, p.message), checkpoint = coalesce(excluded.checkpoint, p.checkpoint)
 WHERE p.token <= excluded.token`

// Progress records the share of the entry that is done, 0 to 1 (NaN is 0), and a message for status output. It
// returns ErrLockLost if the entry is not this run's any more: the handler must stop then. An empty
// message leaves the last one. It is a write to the database: once a second is often enough.
func (r *Run) Progress(ctx context.Context, done float64, message string) error {
	if math.IsNaN(done) { // 0/0, say, of a list without elements
		done = 0
	}
	return r.saveProgress(ctx, min(max(done, 0), 1), postgres.Given(tidy(message)), nil)
}

// checkpointBytesMax bounds a checkpoint: it is written whole each time. What is larger belongs elsewhere.
const checkpointBytesMax = 1 << 20

// Save records a checkpoint, anything that JSON can hold in 1 MiB, from which a retry or another node can go
// on (see Load). It returns ErrLockLost if the entry is not this run's any more.
func (r *Run) Save(ctx context.Context, checkpoint any) error {
	text, err := json.Marshal(checkpoint)
	if err != nil {
		return fmt.Errorf("write checkpoint of entry %d: %w", r.Entry.ID, err)
	}
	if len(text) > checkpointBytesMax {
		return fmt.Errorf("checkpoint of entry %d has %d bytes, more than %d; save a reference to it: %w",
			r.Entry.ID, len(text), checkpointBytesMax, ErrPayloadTooLarge)
	}
	if err := CheckJSON(text); err != nil {
		return fmt.Errorf("checkpoint of entry %d: %w", r.Entry.ID, err)
	}
	return r.saveProgress(ctx, nil, nil, text)
}

func (r *Run) saveProgress(ctx context.Context, done any, message *string, checkpoint []byte) error {
	tag, err := r.Queue.db.Exec(ctx, progressSQL, r.Queue.ID, r.Entry.ID, r.Lock.Key, r.Lock.Token, done, message,
		checkpoint)
	if err != nil {
		return r.Queue.errorf("save progress in", err)
	}
	if tag.RowsAffected() == 0 {
		return fmt.Errorf("save progress of entry %d: %w", r.Entry.ID, ErrLockLost)
	}
	return nil
}

const checkpointSQL = `
SELECT checkpoint
  FROM penstock.progress
 WHERE queue_id = $1 AND entry_id = $2 AND checkpoint IS NOT NULL`

// Load reads the newest checkpoint of the entry, of any run, into a pointer, and reports whether
// there was one. A failure keeps it, so that a retry of the failure finds it.
func (r *Run) Load(ctx context.Context, into any) (bool, error) {
	var text []byte
	err := r.Queue.db.QueryRow(ctx, checkpointSQL, r.Queue.ID, r.Entry.ID).Scan(&text)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil
	case err != nil:
		return false, r.Queue.errorf("load checkpoint from", err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return false, fmt.Errorf("read checkpoint of entry %d: %w", r.Entry.ID, err)
	}
	return true, nil
}

// Decode reads the payload into a pointer. A payload that does not fit is a permanent error of class "payload".
func (r *Run) Decode(into any) error {
	if err := json.Unmarshal(r.Entry.Payload, into); err != nil {
		return Permanent(WithClass("payload", fmt.Errorf("read payload of entry %d: %w", r.Entry.ID, err)))
	}
	return nil
}

// FinishTx ends the entry well inside the handler's own transaction, so that its effects and the completion commit
// together or not at all. It returns ErrLockLost if the entry is not this run's any more: roll back and return it.
// The transaction must be READ COMMITTED, of a pool whose default_query_exec_mode is not exec or simple_protocol
// (behind a pooler: cache_describe). Once it has committed, Handle returns nil. Where the payload is that of entries
// merged by Definition.Merge, it ends all of them with this result.
func (r *Run) FinishTx(ctx context.Context, tx pgx.Tx, result json.RawMessage) error {
	if err := checkResult(result); err != nil {
		return err
	}
	if r.merged == nil {
		return r.finishTx(ctx, tx, result)
	}
	for _, one := range r.merged {
		if err := one.finishTx(ctx, tx, result); err != nil {
			return err
		}
	}
	return nil
}

func (r *Run) finishTx(ctx context.Context, tx pgx.Tx, result json.RawMessage) error {
	var ran time.Duration
	if !r.Began.IsZero() {
		ran = time.Since(r.Began)
	}
	// Not the last ending of the lock: the node that called the handler gives the lock back when Handle returns.
	err := r.Queue.FinishTx(ctx, tx, r.Node, Done(r.Lock, r.Entry.ID, result, ran))
	if postgres.Code(err) != "" && postgres.Unavailable(err) { // a full disk, say: what the handler did was right
		return ThrottleQueue(time.Second, err)
	}
	if err == nil {
		r.Lock.left(r.Entry.ID)
	}
	return err
}

// Progress is the last progress report and checkpoint of an entry.
type Progress struct {
	Done      float64 // 0 to 1
	Message   string
	UpdatedAt time.Time
	// Checkpoint is the state from which the next run goes on, nil if there is none.
	Checkpoint json.RawMessage
}

const readProgressSQL = `
SELECT coalesce(done, 0), coalesce(message, ''), updated_at, checkpoint
  FROM penstock.progress
 WHERE queue_id = $1 AND entry_id = $2`

// Progress returns the progress of an entry, ErrEntryNotFound if none was recorded.
func (q *Queue) Progress(ctx context.Context, id EntryID) (Progress, error) {
	var p Progress
	err := q.db.QueryRow(ctx, readProgressSQL, q.ID, id).Scan(&p.Done, &p.Message, &p.UpdatedAt, &p.Checkpoint)
	if errors.Is(err, pgx.ErrNoRows) {
		return Progress{}, fmt.Errorf("read progress of entry %d: %w", id, ErrEntryNotFound)
	}
	return p, q.errorf("read progress in", err)
}
