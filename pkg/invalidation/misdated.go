package invalidation

import (
	"context"
	"time"
)

// DuePlace is a place among the entries of a queue that are not due yet, in the order of due times. Its zero value is
// before the first one.
type DuePlace struct {
	Due   time.Time
	Entry EntryID
}

// misdated is the condition of entries that were retried by a clock that was ahead: their last error is of a time to
// come, and they are due no sooner. They would be, had they been snoozed since for less than the clock was ahead; a
// longer snooze looks like a retry, and is cut by that. A minute is for clocks that differ by little, as those of two
// servers of which one takes over. Entries that were snoozed by such a clock are not among them: their due time cannot
// be told from one that was wanted, as that of a push, and nothing else of them has a time.
const misdated = `CASE WHEN attempt > 0 THEN (history->-1->>'at')::timestamptz END
       BETWEEN clock_timestamp() + interval '1 minute' AND due_at + interval '1 minute'`

// misdatedSQL finds misdated entries among the next $3 that are due in more than a minute, behind the place $1, $2.
const misdatedSQL = `
WITH part AS MATERIALIZED (
    SELECT id, due_at, attempt, history FROM penstock.entry_X
     WHERE status = 'initial' AND (due_at, id) > (greatest($1, statement_timestamp() + interval '1 minute'), $2::bigint)
     ORDER BY due_at, id LIMIT $3
)
SELECT (SELECT count(*)::int FROM part),
       (SELECT max(due_at) FROM part),
       coalesce((SELECT id FROM part ORDER BY due_at DESC, id DESC LIMIT 1), 0),
       ARRAY(SELECT id FROM part WHERE ` + misdated + `)`

// Misdated returns those of the next `limit` entries behind a place that were retried while the database's clock was
// ahead of what it is now, by more than a minute. They would wait until the clock has come to where it was. It also
// returns the place behind those that it has read, the zero one at the end.
func (q *Queue) Misdated(ctx context.Context, after DuePlace, limit int) (ids []EntryID, next DuePlace, err error) {
	var read int
	var due *time.Time
	err = q.db.QueryRow(ctx, q.sql.misdated, after.Due, after.Entry, limit).Scan(&read, &due, &next.Entry, &ids)
	if err != nil || read < limit {
		return ids, DuePlace{}, q.errorf("find misdated entries of", err)
	}
	next.Due = *due
	return ids, next, nil
}

// redateSQL makes entries $2 due after the wait that their retry was to have, from now on, which is the time of their
// last error then. Those that another transaction has locked, or that are misdated no more, stay as they are.
const redateSQL = `
WITH found AS MATERIALIZED (
    SELECT ctid AS row, due_at - (history->-1->>'at')::timestamptz AS wait
      FROM penstock.entry_X
     WHERE queue_id = $1 AND id = ANY ($2::bigint[]) AND status = 'initial' AND ` + misdated + `
       FOR UPDATE SKIP LOCKED
)
UPDATE penstock.entry_X e
   SET due_at = statement_timestamp() + greatest(f.wait, '0'),
       history = jsonb_set(e.history, '{-1,at}', to_jsonb(statement_timestamp()))
  FROM found f WHERE e.ctid = f.row`

// Redate makes misdated entries due after the wait that their retry was to have, and returns how many.
func (q *Queue) Redate(ctx context.Context, ids []EntryID) (int, error) {
	tag, err := q.db.Exec(ctx, q.sql.redate, q.ID, ids)
	if err != nil {
		return 0, q.errorf("redate entries of", err)
	}
	return int(tag.RowsAffected()), nil
}
