package invalidation

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// appendOutputSQL adds a piece of output of entry $2 while its lock record still carries token $4, as progressSQL does,
// and returns a row if it does. It locks no hour but the one that the piece goes into: there may be hundreds.
const appendOutputSQL = `
WITH mine AS (SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = $3 AND token = $4 FOR KEY SHARE),
     put AS (
    INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
    SELECT $1, $2, $4, $5::integer, $6::integer, $7::bytea
      FROM mine)
SELECT FROM mine`

// againOutputSQL is the same for a piece that may have been added within the hour, as after a lost answer: if it was,
// it changes nothing.
const againOutputSQL = `
WITH mine AS (SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = $3 AND token = $4 FOR KEY SHARE),
     put AS (
    INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
    SELECT $1, $2, $4, $5::integer, $6::integer, $7::bytea
      FROM mine
     WHERE NOT EXISTS (SELECT FROM penstock.output
                        WHERE queue_id = $1 AND entry_id = $2 AND token = $4 AND seq = $6
                          AND at > now() - interval '1 hour'))
SELECT FROM mine`

// OutputBytesMax bounds a piece of output.
const OutputBytesMax = 1 << 20

// AppendOutput adds a piece to the output of the run, for its readers; pieces are numbered from 1
// without gaps, and one that is added again changes nothing. It returns ErrLockLost if the entry is not this
// run's any more, and ErrPayloadTooLarge for more than OutputBytesMax. It is a write to the database: put out
// larger pieces ten times a second rather than each word. One call at a time.
func (r *Run) AppendOutput(ctx context.Context, seq int, data []byte) error {
	if len(data) > OutputBytesMax {
		return fmt.Errorf("append output of entry %d: data of piece %d has %d bytes, more than %d: %w", r.Entry.ID, seq,
			len(data), OutputBytesMax, ErrPayloadTooLarge)
	}
	if data == nil {
		data = []byte{} // nil would be NULL
	}
	sql := appendOutputSQL
	if seq <= r.sent {
		sql = againOutputSQL
	}
	r.sent = max(r.sent, seq)
	put := func() (pgconn.CommandTag, error) {
		return r.Queue.db.Exec(ctx, sql, r.Queue.ID, r.Entry.ID, r.Lock.Key, r.Lock.Token, r.Entry.Attempt+1, seq, data)
	}
	tag, err := put()
	if postgres.Code(err) == postgres.CheckViolation { // the partition of its hour was made meanwhile
		tag, err = put()
	}
	if err != nil {
		return r.Queue.errorf("append output in", err)
	}
	if tag.RowsAffected() == 0 {
		return fmt.Errorf("append output of entry %d: %w", r.Entry.ID, ErrLockLost)
	}
	return nil
}

// Output is a piece of the output of a run. Pieces of one token belong together; a newer token
// begins anew.
type Output struct {
	Token   Token
	Attempt int // 1 for the first
	Seq     int
	Data    []byte
}

const acceptedSQL = `
SELECT coalesce(min(a.created_at), '-infinity')
  FROM (SELECT created_at FROM penstock.entry WHERE queue_id = $1 AND id = $2
        UNION ALL SELECT created_at FROM penstock.result WHERE queue_id = $1 AND entry_id = $2
        UNION ALL SELECT created_at FROM penstock.failure WHERE queue_id = $1 AND entry_id = $2) a`

// outputMargin is how long before an entry was accepted its output is read from, by the database's clock: that may have
// been set back since.
const outputMargin = time.Hour

// OutputFrom returns from when on an entry that was accepted then may have output; of the zero time that time.
func OutputFrom(accepted time.Time) time.Time {
	if accepted.IsZero() {
		return accepted
	}
	return accepted.Add(-outputMargin)
}

// OutputSince returns from when on an entry may have output. Output is kept in hours, each a table: those before are
// not read.
func (q *Queue) OutputSince(ctx context.Context, id EntryID) (time.Time, error) {
	var at pgtype.Timestamptz // of an entry that is not kept any more -infinity, whose time is zero
	err := q.db.QueryRow(ctx, acceptedSQL, q.ID, id).Scan(&at)
	return OutputFrom(at.Time), q.errorf("read when an entry was accepted in", err)
}

// readOutputSQL is planned for its time: a generic plan, which sessions have else, locks the tables of all hours. So is
// watchOutputSQL.
const readOutputSQL = `
SELECT token, attempt, seq, data
  FROM penstock.output
 WHERE queue_id = $1 AND entry_id = $2 AND (token, seq) > ($3, $4) AND at >= $6
 ORDER BY token, seq
 LIMIT $5`

// Output reads up to limit pieces of an entry's output behind the one that token and seq name, 0 and 0 for all, none
// from before since, see OutputSince.
func (q *Queue) Output(ctx context.Context, id EntryID, since time.Time, token Token, seq, limit int) ([]Output,
	error,
) {
	pieces, err := pgx.CollectRows(postgres.Query(ctx, q.db, readOutputSQL, pgx.QueryExecModeSimpleProtocol,
		q.ID, id, token, seq, limit, since), pgx.RowToStructByPos[Output])
	return pieces, q.errorf("read output in", err)
}
