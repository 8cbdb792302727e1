package invalidation

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// LockRef names a lock: a lock record of that queue and key is another lock if it has another token.
type LockRef struct {
	QueueID int32
	Key     string
	Token   Token
}

// HeldLock is a lock record as recovery sees it.
type HeldLock struct {
	LockRef
	Node     NodeID
	Age      time.Duration // since the claim, by the database's clock
	Lane     Lane
	Claim    int32 // the claim that brought it, as the node numbered it
	Position int64 // the key's
}

const heldLocksSQL = `
SELECT queue_id, lock_key, token, node_id, extract(epoch FROM clock_timestamp() - claimed_at)::float8, priority, flow,
       claim_id, pos
  FROM penstock.lock`

// HeldLocks returns every lock record: the table is as small as the work in flight.
func HeldLocks(ctx context.Context, db postgres.DB) ([]HeldLock, error) {
	return pgx.CollectRows(postgres.Query(ctx, db, heldLocksSQL), func(row pgx.CollectableRow) (HeldLock, error) {
		var l HeldLock
		var age float64
		err := row.Scan(&l.QueueID, &l.Key, &l.Token, &l.Node, &age, &l.Lane.Priority, &l.Lane.Flow, &l.Claim,
			&l.Position)
		l.Age = time.Duration(age * float64(time.Second))
		return l, err
	})
}

// stillHeldSQL returns those of tokens $3 that the lock records of keys $2 of queues $1 carry.
const stillHeldSQL = `
SELECT l.token
  FROM unnest($1::integer[], $2::text[], $3::bigint[]) t(queue_id, lock_key, token)
 CROSS JOIN LATERAL (
       SELECT token FROM penstock.lock
        WHERE queue_id = t.queue_id AND lock_key = t.lock_key AND token = t.token OFFSET 0) l`

// StillHeld returns the tokens of those locks that nobody has freed.
func StillHeld(ctx context.Context, db postgres.DB, locks []LockRef) ([]Token, error) {
	queues, keys, tokens := make([]int32, len(locks)), make([]string, len(locks)), make([]Token, len(locks))
	for i, l := range locks {
		queues[i], keys[i], tokens[i] = l.QueueID, l.Key, l.Token
	}
	return pgx.CollectRows(postgres.Query(ctx, db, stillHeldSQL, queues, keys, tokens), pgx.RowTo[Token])
}

// Recovered is the result of a recovery.
type Recovered struct {
	Freed        []Token   // locks that were ended; their keys are ready again at their old positions
	DeadLettered []EntryID // entries on which too many nodes had died: they went to the failures as poison
}

// recoverHoldSQL locks the records $2 with tokens $3 that no transaction is settling. $4 says that their node
// died: then only those whose node's lease has lapsed by the database's clock. Else their node left them out
// of its heartbeats: then only those that it does not list by now. A recovery does not wait; a record that it
// skips it meets in its next pass.
const recoverHoldSQL = `
SELECT l.token
  FROM (SELECT lock_key COLLATE "C" AS lock_key, token FROM unnest($2::text[], $3::bigint[]) t(lock_key, token)
      ORDER BY 1) k
 CROSS JOIN LATERAL (
       SELECT token FROM penstock.lock l
        WHERE l.queue_id = $1 AND l.lock_key = k.lock_key AND l.token = k.token
          AND (SELECT n.id FROM penstock.node n
                WHERE n.id = l.node_id
                  AND CASE WHEN $4::boolean THEN n.beat_at + n.lease > clock_timestamp()
                      ELSE l.token = ANY (n.tokens) END) IS NULL
          FOR UPDATE OF l SKIP LOCKED) l`

// crashSQL counts a crash for the entry that each of the locks with tokens $3 was running, and returns those that have
// used up the crash limit $4 of the queue. The entry has started, so that its start_by binds no more. The row of the
// node keeps which entries it crashed, for penstock.take_back_crashes.
//
// Of a group that is the oldest entry that is left, from the one on which the last heartbeat calls running: entries run
// in the order of their ids, and one before it may have become claimable during the lock. Nor does the lock cover an
// entry that came due after the claim, unless the heartbeat names it and it was due by then: the entries are read later
// than claimed_at. One that came due after the heartbeat was handed back since, and has come in line again. What cannot
// be decided: a push that committed after the claim, or an entry that was enabled, counts the crash if it is before the
// entry that ran and behind the one of the last heartbeat, or if no heartbeat called the lock running; and so does an
// entry whose ending was not recorded, for the one behind it.
const crashSQL = `
WITH struck AS (
    UPDATE penstock.entry_X e
       SET crashes = e.crashes + 1, start_by = NULL,
           history = penstock.history_add(e.history,
               jsonb_build_object('class', 'crash', 'node', k.node_id, 'token', k.token,
                                          'error', 'node ' || k.name || ' died while it ran this entry'))
      FROM (SELECT l.token, l.node_id,
            coalesce((SELECT n.name FROM penstock.node n WHERE n.id = l.node_id), l.node_id::text) AS name,
                   CASE WHEN penstock.is_solo(l.lock_key) THEN l.last_entry_id
                        ELSE (SELECT g.id FROM penstock.entry_X g
                               WHERE g.lock_key = l.lock_key AND penstock.claimable(g.status, g.priority)
                                 AND g.id BETWEEN coalesce(r.running, 0) AND l.last_entry_id
                                 AND (g.due_at IS NULL
                                      OR g.due_at <= CASE g.id WHEN r.running THEN r.beat_at ELSE l.claimed_at END)
                               ORDER BY g.id LIMIT 1) END AS entry_id
              FROM unnest($2::text[], $3::bigint[]) t(lock_key, token)
             CROSS JOIN LATERAL (
                   SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = t.lock_key
                       AND token = t.token OFFSET 0) l
              LEFT JOIN LATERAL (
                   SELECT n.running_entries[array_position(n.running, l.token)] AS running, n.beat_at
                     FROM penstock.node n WHERE n.id = l.node_id OFFSET 0) r ON true
             ORDER BY 4) k
     CROSS JOIN LATERAL (SELECT ctid AS row FROM penstock.entry_X WHERE queue_id = $1 AND id = k.entry_id OFFSET 0) f
     WHERE e.ctid = f.row
    RETURNING e.id, e.crashes, k.node_id
), blamed AS (
    UPDATE penstock.node n
       SET crashed_queues = n.crashed_queues || array_fill($1::integer, ARRAY[cardinality(s.ids)]),
           crashed_entries = n.crashed_entries || s.ids
      FROM (SELECT node_id, array_agg(id) AS ids FROM struck WHERE crashes < $4 GROUP BY node_id) s
     WHERE n.id = s.node_id
)
SELECT id FROM struck WHERE crashes >= $4`

// coveredSQL is a FROM clause: lock records l of keys $2 with tokens $3, and the entries e that each of them covers.
const coveredSQL = `unnest($2::text[], $3::bigint[]) t(lock_key, token)
     CROSS JOIN LATERAL (
           SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = t.lock_key AND token = t.token OFFSET 0) l
     CROSS JOIN LATERAL (
           SELECT ctid AS row, id, may_have_run FROM penstock.entry_X
            WHERE penstock.is_solo(l.lock_key) AND queue_id = $1 AND id = l.last_entry_id
           UNION ALL
           SELECT ctid, id, may_have_run FROM penstock.entry_X
            WHERE NOT penstock.is_solo(l.lock_key) AND lock_key = l.lock_key AND penstock.claimable(status, priority)
              AND id <= l.last_entry_id
           OFFSET 0) e`

// recoverEntriesSQL locks the entries that locks $2 with tokens $3 cover, and returns the tokens of those locks of
// which another transaction has locked or changed an entry. It waits for none, or one such entry would hold up all
// others.
const recoverEntriesSQL = `
WITH covered AS MATERIALIZED (
    SELECT l.token, e.id
      FROM ` + coveredSQL + `
), entries AS MATERIALIZED (
    SELECT e.id
      FROM (SELECT id FROM covered ORDER BY id) c
     CROSS JOIN LATERAL (SELECT id FROM penstock.entry_X WHERE queue_id = $1 AND id = c.id FOR UPDATE SKIP LOCKED) e
)
SELECT DISTINCT token FROM covered WHERE (id IN (SELECT id FROM entries)) IS NOT TRUE`

// mayHaveRunSQL marks the entries that locks $2 with tokens $3 cover: each of them may have run, of a group also those
// behind the first, if their node had not recorded the endings before them. The mark has no other reader than handlers
// (Entry.MayHaveRun). An entry that another transaction changes at this moment raises 40001, so that none is left out.
const mayHaveRunSQL = `
WITH covered AS MATERIALIZED (
    SELECT e.row
      FROM ` + coveredSQL + `
     WHERE e.may_have_run IS NOT TRUE
), marked AS (
    UPDATE penstock.entry_X d SET may_have_run = true FROM covered WHERE d.ctid = covered.row RETURNING d.id
)
SELECT penstock.all_ended((SELECT count(*) FROM covered), (SELECT count(*) FROM marked))`

// deadLetterSQL moves entries $2 to the failures as poison.
const deadLetterSQL = `
WITH gone AS (
    DELETE FROM penstock.entry_X d
     USING unnest($2::bigint[]) k(id)
     CROSS JOIN LATERAL (SELECT ctid AS row FROM penstock.entry_X WHERE queue_id = $1 AND id = k.id OFFSET 0) e
     WHERE d.ctid = e.row
    RETURNING d::penstock.entry AS entry, d.attempt, d.crashes, d.history
)
SELECT penstock.add_failure(entry, attempt, 'poison', 'poison: ' || crashes || ' nodes died while they ran this entry',
                            'poison: _ nodes died while they ran this entry', history)
  FROM gone`

// Recover ends locks of this queue that no node will settle and makes their keys ready at their old
// positions, all under fence: a lock that was settled meanwhile is skipped, and so is one of which another
// transaction has locked the record or an entry. All their entries are marked (Entry.MayHaveRun), and the mark stays
// where a crash is taken back later. crashed reports that their node died: its lease must have lapsed by the
// database's clock, and each lock of ran counts a crash (never an attempt) for the entry that it ran. waited are locks
// that no thread had begun to run: they count none, and their tokens of token buckets are refunded. Locks that a live
// node does not list are not refunded: they go into ran.
//
// The entries of waited are marked too: between two heartbeats a thread may end a run whose ending is not recorded and
// begin another one, and a node may serve its lanes in another order than recovery supposes. Then an entry has run
// whose lock counts as waiting.
func (q *Queue) Recover(ctx context.Context, ran, waited []LockRef, crashed bool) (Recovered, error) {
	var r Recovered
	err := postgres.InTx(ctx, q.db, func(tx pgx.Tx) error {
		held, err := q.holdForRecovery(ctx, tx, slices.Concat(ran, waited), crashed)
		if err != nil || len(held) == 0 {
			return err
		}
		if held, err = q.holdEntries(ctx, tx, held); err != nil {
			return err
		}
		if err := q.markMayHaveRun(ctx, tx, held); err != nil {
			return err
		}
		begun, unrun := splitByWaited(held, waited)
		if crashed {
			if r.DeadLettered, err = q.countCrashes(ctx, tx, begun); err != nil {
				return err
			}
		}
		batch := &pgx.Batch{}
		q.addRefundUnrun(batch, unrun)
		q.addUnlock(batch, held)
		if err := tx.SendBatch(ctx, batch).Close(); err != nil {
			return err
		}
		_, r.Freed = keysAndTokens(held)
		return nil
	})
	if err != nil {
		return Recovered{}, q.errorf("recover locks of", err)
	}
	return r, nil
}

// holdForRecovery locks the records of locks, and returns those that it could lock.
func (q *Queue) holdForRecovery(ctx context.Context, tx pgx.Tx, locks []LockRef, crashed bool) ([]unlocking, error) {
	byToken := make(map[Token]LockRef, len(locks))
	keys, tokens := make([]string, len(locks)), make([]Token, len(locks))
	for i, l := range locks {
		byToken[l.Token], keys[i], tokens[i] = l, l.Key, l.Token
	}
	return pgx.CollectRows(postgres.Query(ctx, tx, recoverHoldSQL, q.ID, keys, tokens, crashed),
		func(row pgx.CollectableRow) (unlocking, error) {
			var token Token
			err := row.Scan(&token)
			return unlocking{key: byToken[token].Key, token: token, requeue: "front"}, err
		})
}

// holdEntries locks the entries of locks, and leaves out the locks of which another transaction has one.
func (q *Queue) holdEntries(ctx context.Context, tx pgx.Tx, held []unlocking) ([]unlocking, error) {
	if len(held) == 0 {
		return nil, nil
	}
	keys, tokens := keysAndTokens(held)
	busy, err := pgx.CollectRows(postgres.Query(ctx, tx, q.sql.recoverEntries, q.ID, keys, tokens), pgx.RowTo[Token])
	return slices.DeleteFunc(held, func(l unlocking) bool { return slices.Contains(busy, l.token) }), err
}

// splitByWaited separates the locks that count as begun from those that waited.
func splitByWaited(held []unlocking, waited []LockRef) (begun, unrun []unlocking) {
	waiting := make(map[Token]bool, len(waited))
	for _, l := range waited {
		waiting[l.Token] = true
	}
	for _, l := range held {
		if waiting[l.token] {
			unrun = append(unrun, l)
		} else {
			begun = append(begun, l)
		}
	}
	return begun, unrun
}

// markMayHaveRun marks the entries of locks that another than their node ends.
func (q *Queue) markMayHaveRun(ctx context.Context, tx pgx.Tx, held []unlocking) error {
	if len(held) == 0 {
		return nil
	}
	keys, tokens := keysAndTokens(held)
	_, err := tx.Exec(ctx, q.sql.mayHaveRun, q.ID, keys, tokens)
	return err
}

func (q *Queue) countCrashes(ctx context.Context, tx pgx.Tx, begun []unlocking) ([]EntryID, error) {
	if len(begun) == 0 {
		return nil, nil
	}
	keys, tokens := keysAndTokens(begun)
	poison, err := pgx.CollectRows(postgres.Query(ctx, tx, q.sql.crash, q.ID, keys, tokens, q.Config.CrashLimit),
		pgx.RowTo[EntryID])
	if err != nil || len(poison) == 0 {
		return nil, err
	}
	if _, err := tx.Exec(ctx, q.sql.callBackPoison, q.ID, poison); err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, q.sql.deadLetter, q.ID, poison)
	return poison, err
}
