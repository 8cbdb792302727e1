package invalidation

import (
	"context"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// Settle records endings of entries that this node runs, all in one short transaction, and returns
// the tokens of locks that this node still held. An ending under any other token is refused: it
// changes nothing, and the caller drops the result. An ending that was settled before is refused as
// well, without harm, so that after an ambiguous error the caller simply settles again. It waits for rows that other
// transactions have locked: nodes call SettleFree, and a claim calls Settle for locks that it found empty.
func (q *Queue) Settle(ctx context.Context, node NodeID, endings []Ending) (ours []Token, err error) {
	q.pay(endings)
	ours, err = q.settle(ctx, node, endings, nil)
	q.countRemoved(ctx, endings, ours)
	return ours, err
}

// SettleFree is Settle for the endings whose rows no other transaction has locked: it waits for rows for 250 ms, or not
// at all if wait is false, and then leaves out the locks that it would have to wait for. It returns their tokens as
// busy: none of the endings of these locks is settled. With an error it is unknown what was settled.
func (q *Queue) SettleFree(
	ctx context.Context, node NodeID, endings []Ending, wait bool,
) (ours, busy []Token, err error) {
	defer func() { q.countRemoved(ctx, endings, ours) }()
	q.pay(endings)
	if wait {
		lockTimeout := "250ms"
		ours, err = q.settle(ctx, node, endings, &lockTimeout)
		if postgres.Code(err) != postgres.LockNotAvailable {
			return ours, nil, err
		}
	}
	rest := without(endings, ours)
	for tries := 1; ; tries++ {
		var more []Token
		more, busy, err = q.settleUnlocked(ctx, node, rest)
		if !changedMeanwhile(err) || tries == triesMax {
			return append(ours, more...), busy, err
		}
	}
}

// settleUnlocked settles, in one transaction, the endings whose rows it can lock at once.
func (q *Queue) settleUnlocked(ctx context.Context, node NodeID, endings []Ending) (ours, busy []Token, err error) {
	c := pick(endings, func(*Ending) bool { return true })
	for i, e := range c.endings {
		if e.verb == verbYield || e.verb == verbRelease && !e.unbinds() { // the entry stays as it is
			c.ids[i] = 0
		}
	}
	err = postgres.InTx(ctx, q.db, func(tx pgx.Tx) error {
		busy, err = pgx.CollectRows(postgres.Query(ctx, tx, q.sql.busy, q.ID, c.keys, c.tokens, c.ids),
			pgx.RowTo[Token])
		if err != nil {
			return q.errorf("lock what is to be settled of", err)
		}
		free := without(endings, busy)
		if len(free) == 0 {
			return nil
		}
		s, err := q.WithTx(tx).settleHeld(ctx, node, free, false, nil)
		ours = s.ours
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return ours, busy, nil
}

// without leaves the endings under some tokens out.
func without(endings []Ending, tokens []Token) []Ending {
	return slices.DeleteFunc(slices.Clone(endings),
		func(e Ending) bool { return slices.Contains(tokens, e.Lock.Token) })
}

// busySQL locks what endings of entries $4 under locks $2 with tokens $3 change, lock records and entries, and
// returns the tokens of those locks of which another transaction has locked a part. It waits for none. An id of 0 is
// that of no entry.
const busySQL = `
WITH asked AS MATERIALIZED (
    SELECT lock_key COLLATE "C" AS lock_key, token, id
      FROM unnest($2::text[], $3::bigint[], $4::bigint[]) u(lock_key, token, id)
), records AS MATERIALIZED (
    SELECT a.token
      FROM (SELECT DISTINCT lock_key, token FROM asked ORDER BY lock_key) a
     CROSS JOIN LATERAL (
           SELECT token FROM penstock.lock
            WHERE queue_id = $1 AND lock_key = a.lock_key AND token = a.token FOR UPDATE SKIP LOCKED) l
), entries AS MATERIALIZED (
    SELECT a.id
      FROM (SELECT DISTINCT id FROM asked ORDER BY id) a
     CROSS JOIN LATERAL (SELECT id FROM penstock.entry_X WHERE queue_id = $1 AND id = a.id FOR UPDATE SKIP LOCKED) e
)
SELECT a.token
  FROM asked a
 CROSS JOIN LATERAL (
       SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = a.lock_key AND token = a.token OFFSET 0) l
 WHERE (a.token IN (SELECT token FROM records)) IS NOT TRUE
 UNION
SELECT a.token
  FROM asked a
 CROSS JOIN LATERAL (SELECT FROM penstock.entry_X WHERE queue_id = $1 AND id = a.id OFFSET 0) e
 WHERE (a.id IN (SELECT id FROM entries)) IS NOT TRUE`

// triesMax bounds how often endings are tried that meet a change each time.
const triesMax = 10

// settle waits for rows that other transactions have locked for lockTimeout at most, nil for as long as the session
// does. After lock_not_available, ours are those that the short statement (finishSolo) had committed before; nothing
// else was settled.
func (q *Queue) settle(
	ctx context.Context, node NodeID, endings []Ending, lockTimeout *string,
) (ours []Token, err error) {
	byTID := !slices.ContainsFunc(endings, func(e Ending) bool { return !e.Lock.tidOf(e.Entry).Valid })
	if byTID && q.soloDone(endings) {
		switch ours, err = q.finishSolo(ctx, node, endings, lockTimeout); {
		case err == nil && len(ours) == len(endings):
			return ours, nil
		case err != nil && !changedMeanwhile(err):
			return nil, err
		}
		endings = without(endings, ours)
		byTID = false
	}
	for tries := 1; len(endings) > 0; tries++ {
		s, err := q.settleHeld(ctx, node, endings, byTID, lockTimeout)
		if !changedMeanwhile(err) || tries == triesMax {
			return append(ours, s.ours...), err
		}
		byTID = false
	}
	return ours, nil
}

// entryChanged is the SQLSTATE of penstock.all_ended: an operator changed an entry (disabled it, say) at the very
// moment when it was ended. Nothing was written; the next try, which waits for the operator's commit, sees it.
const entryChanged = postgres.SerializationFailure

// changedMeanwhile says that something that endings depend on changed at the very moment: an entry, or the partitions
// of results and failures. A row that was on its way to the default partition when its day got one of its own is
// refused there, with the SQLSTATE of a check constraint and without the name of one; the next try goes to the new one.
func changedMeanwhile(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) &&
		(pg.Code == entryChanged || pg.Code == postgres.CheckViolation && pg.ConstraintName == "")
}

// settled is what a transaction of settleHeld did.
type settled struct {
	ours []Token // the tokens of the endings that their locks still carried
	done int     // entries that ended done
}

// settleHeld settles under locked lock records. byTID finds entries only where the claim saw them, which may fail with
// entryChanged. For lockTimeout see settle.
func (q *Queue) settleHeld(
	ctx context.Context, node NodeID, endings []Ending, byTID bool, lockTimeout *string,
) (settled, error) {
	batch := &pgx.Batch{}
	var s settled
	q.addHold(batch, endings, lockTimeout, &s.ours)
	q.addCallbacks(batch, endings) // while the entries are still there
	q.addDone(batch, node, endings, byTID, &s.done)
	q.addRetry(batch, node, endings)
	q.addFail(batch, node, endings)
	q.addRefund(batch, endings) // while cancelled entries are still there: once for each
	q.addRemove(batch, node, endings)
	q.addStarted(batch, endings)
	q.addThrottles(batch, endings)
	keepHandedBack(endings)
	q.addUnlock(batch, unlockings(endings))
	if err := q.db.SendBatch(ctx, batch).Close(); err != nil {
		return settled{}, q.errorf("settle entries of", err)
	}
	return s, nil
}

// keepHandedBack keeps in the locks that entries of theirs are handed back: of entries that run together any may be,
// and the last ending of the lock may be settled in a later transaction.
func keepHandedBack(endings []Ending) {
	for i := range endings {
		if e := &endings[i]; e.verb == verbRelease {
			e.Lock.handedBack, e.Lock.delay = true, max(e.Lock.delay, e.delay)
		}
	}
}

// unlockings are the locks that end with endings.
func unlockings(endings []Ending) (locks []unlocking) {
	for i := range endings {
		if e := &endings[i]; e.Last {
			locks = append(locks, unlocking{e.Lock.Key, e.Lock.Token, e.requeue(), e.Lock.delay, e.Lock})
		}
	}
	return locks
}

// soloDone reports whether all endings are finishes of solo entries without callback, which have a shorter statement.
func (q *Queue) soloDone(endings []Ending) bool {
	return !slices.ContainsFunc(endings, func(e Ending) bool {
		return e.verb != verbDone || !e.Last || !e.Lock.Solo() || e.Lock.callback(e.Entry) != nil
	})
}

// holdSQL locks the lock records that are still ours until the transaction ends, in key order, so that two
// settlers never wait for each other in a ring. The statements after it see every entry whose ready row a sweep
// deleted, for the sweep held the record FOR KEY SHARE. Under a fixed snapshot they would not: need_read_committed
// raises. $4 is the lock_timeout of this transaction, null for that of the session.
const holdSQL = `
SELECT l.token
  FROM (SELECT lock_key COLLATE "C" AS lock_key, token FROM unnest($2::text[], $3::bigint[]) t(lock_key, token)
      ORDER BY 1) k
 CROSS JOIN LATERAL (
       SELECT token FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token FOR UPDATE) l
 WHERE (SELECT penstock.need_read_committed()) IS NOT NULL
   AND (SELECT set_config('lock_timeout', coalesce($4::text, current_setting('lock_timeout')), true)) IS NOT NULL`

func (q *Queue) addHold(batch *pgx.Batch, endings []Ending, lockTimeout *string, ours *[]Token) {
	keys, tokens := locksOf(endings)
	batch.Queue(holdSQL, q.ID, keys, tokens, lockTimeout).Query(func(rows pgx.Rows) error {
		held, err := pgx.CollectRows(rows, pgx.RowTo[Token])
		*ours = held
		return err
	})
}

// locksOf names each lock of the endings once.
func locksOf(endings []Ending) (keys []string, tokens []Token) {
	type lock struct {
		key   string
		token Token // a server that lost its last commits draws tokens again, for other keys
	}
	seen := make(map[lock]bool, len(endings))
	for i := range endings {
		l := endings[i].Lock
		id := lock{l.Key, l.Token}
		if !seen[id] {
			seen[id] = true
			keys, tokens = append(keys, l.Key), append(tokens, l.Token)
		}
	}
	return keys, tokens
}

// countRemoved tells the depth counter of a queue with a capacity which entries have left it: those of endings
// under the tokens that were ours, also where the handler's transaction had ended the entry (FinishTx counts
// nothing, for that transaction may still roll back). The counter is an estimate that the next count mends,
// so that this runs after the commit, and an error is none of the endings.
func (q *Queue) countRemoved(ctx context.Context, endings []Ending, ours []Token) {
	if !q.Config.CountsDepth() || len(ours) == 0 {
		return
	}
	took := make(map[Token]bool, len(ours))
	for _, t := range ours {
		took[t] = true
	}
	n := 0
	for i := range endings {
		e := &endings[i]
		if took[e.Lock.Token] && !slices.Contains([]verb{verbRetry, verbRelease, verbPostpone, verbYield}, e.verb) {
			n++
		}
	}
	if n > 0 {
		_, _ = q.db.Exec(ctx,
			`SELECT penstock.count(queue_id, 'removed', $2) FROM penstock.depth WHERE queue_id = $1`, q.ID, n)
	}
}
