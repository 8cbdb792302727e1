package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// finishSoloSQL ends solo entries $2 under tokens $3: lock record and entry go, and results $4 are kept if $6
// says so. No entry can be behind a solo key, so nothing is looked for again. It goes to where the claim saw
// the rows, lock records at $9 and entries at $10, not through their indexes (ADR 14). Neither row moves
// while the lock is held, unless the entry is changed or the table rewritten (VACUUM FULL), and then
// another may stand there: token and id decide, and both, for a server that came back without its last
// commits hands tokens out twice. A lock that is not found may have moved, or is not ours any more. An entry
// that is not found under a lock of ours takes the statement back with entryChanged. In both cases Settle
// goes the long way, by keys. Each statement of this kind deletes rows in the order of the disk, so that two
// of them never wait for each other in a ring. $11 is the lock_timeout of this transaction, null for that of the
// session.
const finishSoloSQL = `
WITH held AS MATERIALIZED (
    SELECT *
      FROM unnest($2::bigint[], $3::bigint[], $4::jsonb[], $5::bigint[], $8::jsonb[], $10::tid[])
          k(id, token, result, run_ms, meta, row)
     WHERE (SELECT set_config('lock_timeout', coalesce($11::text, current_setting('lock_timeout')), true)) IS NOT NULL
), freed AS MATERIALIZED (
    DELETE FROM penstock.lock
     WHERE ctid = ANY ($9::tid[]) AND ((token, last_entry_id) IN (SELECT token, id FROM held)) IS TRUE
    RETURNING token
), ended AS MATERIALIZED (
    SELECT * FROM held WHERE (token IN (SELECT token FROM freed)) IS TRUE
), gone AS MATERIALIZED (
    DELETE FROM penstock.entry_X
     WHERE ctid = ANY ($10::tid[]) AND (id IN (SELECT id FROM ended)) IS TRUE
    RETURNING id
), kept AS (
    INSERT INTO penstock.result (queue_id, entry_id, created_at, node_id, token, run_ms, attempt, outcome, result, meta)
    SELECT $1, k.id, e.created_at, $7::bigint, k.token, k.run_ms, e.attempt, 'done', k.result, k.meta
      FROM ended k
     CROSS JOIN LATERAL (SELECT created_at, attempt FROM penstock.entry_X WHERE ctid = k.row AND id = k.id OFFSET 0) e
     WHERE $6::boolean
    RETURNING entry_id
)
SELECT token FROM freed
 WHERE penstock.all_ended((SELECT count(*) FROM freed), (SELECT count(*) FROM gone))
   AND (NOT $6::boolean OR penstock.all_ended((SELECT count(*) FROM gone), (SELECT count(*) FROM kept)))`

func (q *Queue) finishSolo(
	ctx context.Context, node NodeID, endings []Ending, lockTimeout *string,
) ([]Token, error) {
	c := pick(endings, is(verbDone))
	locks, entries := c.tids()
	rows := postgres.Query(ctx, q.db, q.sql.finishSolo, q.ID, c.ids, c.tokens, q.results(c), c.ran, q.keepsResults(),
		node, q.metas(c), locks, entries, lockTimeout)
	ours := make([]Token, 0, len(endings))
	var token Token
	if _, err := pgx.ForEachRow(rows, []any{(*int64)(&token)},
		func() error { ours = append(ours, token); return nil }); err != nil {
		return nil, q.errorf("finish entries of", err)
	}
	return ours, nil
}

func (q *Queue) keepsResults() bool { return q.Config.ResultRetention > 0 }

// results are the results to be kept; none cross the wire if the queue keeps none.
func (q *Queue) results(c columns) []json.RawMessage {
	if !q.keepsResults() {
		return []json.RawMessage{}
	}
	return each(c, func(e *Ending) json.RawMessage { return e.result })
}

// metas are the notes on the results to be kept; an empty array means none.
func (q *Queue) metas(c columns) []json.RawMessage {
	noted := func(e *Ending) bool { return e.meta != nil }
	if !q.keepsResults() || !slices.ContainsFunc(c.endings, noted) {
		return []json.RawMessage{}
	}
	return each(c, func(e *Ending) json.RawMessage { return e.meta })
}

// doneSQL ends entries $4 under locks $2 with tokens $3, each named once; $10 says which token each entry is
// under. It finds entries at the tids $11, see finishSoloSQL, or by their ids where $11 is empty: then one
// that is gone is passed over. The lock records stay: unlockSQL ends them.
const doneSQL = `
WITH ours AS MATERIALIZED (
    SELECT k.token
      FROM unnest($2::text[], $3::bigint[]) k(lock_key, token)
     CROSS JOIN LATERAL (
           SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
), ended AS MATERIALIZED (
    SELECT *
      FROM unnest($10::bigint[], $4::bigint[], $5::jsonb[], $6::bigint[], $9::jsonb[], $11::tid[])
          k(token, id, result, run_ms, meta, row)
     WHERE (token IN (SELECT token FROM ours)) IS TRUE
), found AS MATERIALIZED (
    SELECT k.token, k.id, k.result, k.run_ms, k.meta, coalesce(k.row, e.row) AS row
      FROM ended k
      LEFT JOIN LATERAL (
           SELECT ctid AS row FROM penstock.entry_X WHERE k.row IS NULL AND queue_id = $1
               AND id = k.id OFFSET 0) e ON true
     WHERE coalesce(k.row, e.row) IS NOT NULL
), gone AS MATERIALIZED (
    DELETE FROM penstock.entry_X
     WHERE ctid = ANY (ARRAY(SELECT row FROM found)) AND (id IN (SELECT id FROM found)) IS TRUE
    RETURNING id
), kept AS (
    INSERT INTO penstock.result (queue_id, entry_id, created_at, node_id, token, run_ms, attempt, outcome, result, meta)
    SELECT $1, k.id, e.created_at, $8::bigint, k.token, k.run_ms, e.attempt, 'done', k.result, k.meta
      FROM found k
     CROSS JOIN LATERAL (SELECT created_at, attempt FROM penstock.entry_X WHERE ctid = k.row AND id = k.id OFFSET 0) e
     WHERE $7::boolean
)
SELECT penstock.all_ended((SELECT count(*) FROM found), (SELECT count(*) FROM gone)),
       (SELECT count(*) FROM gone) AS ended`

// addDone sets *ended to the number of entries that it ended.
func (q *Queue) addDone(batch *pgx.Batch, node NodeID, endings []Ending, byTID bool, ended *int) {
	endings, others := oneKeyEach(endings)
	if len(others) > 0 {
		q.addDone(batch, node, others, byTID, new(int))
	}
	c := pick(endings, is(verbDone))
	if len(c.ids) == 0 {
		return
	}
	keys, tokens := locksOf(endings)
	entries := tids{}
	if byTID {
		_, entries = c.tids()
	}
	args := []any{q.ID, keys, tokens, c.ids, q.results(c), c.ran, q.keepsResults(), node, q.metas(c), c.tokens, entries}
	batch.Queue(q.sql.done, args...).QueryRow(func(row pgx.Row) error {
		var all bool
		return row.Scan(&all, ended)
	})
}

// oneKeyEach takes out the endings whose token comes with another key before: doneSQL goes by the token of an entry,
// and a server that lost its last commits draws tokens again, for other keys.
func oneKeyEach(endings []Ending) (ones, others []Ending) {
	keys := make(map[Token]string, len(endings))
	another := func(e Ending) bool {
		key, seen := keys[e.Lock.Token]
		if !seen {
			keys[e.Lock.Token] = e.Lock.Key
		}
		return seen && key != e.Lock.Key
	}
	if !slices.ContainsFunc(endings, another) {
		return endings, nil
	}
	ones = slices.DeleteFunc(slices.Clone(endings), another)
	return ones, slices.DeleteFunc(slices.Clone(endings), func(e Ending) bool { return !another(e) })
}

// FinishTx ends an entry well inside the handler's own transaction, so that the effects and the completion
// commit together. It returns ErrLockLost if the entry is not ours any more, or has ended by an earlier
// transaction whose answer was lost, and ErrConflict if an operator changed it just now: roll back then. The
// transaction must be READ COMMITTED: under a fixed snapshot the key's entries that came since could not be
// seen, and would be left behind. Its pool may have any default_query_exec_mode but exec and simple_protocol, which do
// not know the types of the arguments.
func (q *Queue) FinishTx(ctx context.Context, tx pgx.Tx, node NodeID, ending Ending) error {
	switch mode := tx.Conn().Config().DefaultQueryExecMode; mode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
		return fmt.Errorf("finish entry %d of queue %q: the pool of the transaction has the default_query_exec_mode "+
			"%q, use cache_describe: %w", ending.Entry, q.Name, mode, ErrInvalid)
	}
	var isolation string
	if err := tx.QueryRow(ctx, `SELECT current_setting('transaction_isolation')`).Scan(&isolation); err != nil {
		return q.errorf("finish entry of", err)
	}
	if isolation != "read committed" {
		return fmt.Errorf("finish entry %d of queue %q: the transaction is %s, use read committed: %w", ending.Entry,
			q.Name, isolation, ErrInvalid)
	}
	// Not by Settle, which tries again what meets a change: here the transaction is aborted by then.
	s, err := q.WithTx(tx).settleHeld(ctx, node, []Ending{ending}, false, nil)
	if changedMeanwhile(err) {
		return fmt.Errorf("finish entry %d of queue %q; roll back and run it again: %w (%w)", ending.Entry, q.Name,
			ErrConflict, err)
	}
	if err != nil {
		return err
	}
	if len(s.ours) == 0 || ending.verb == verbDone && s.done != 1 {
		return fmt.Errorf("finish entry %d of queue %q: %w", ending.Entry, q.Name, ErrLockLost)
	}
	return nil
}
