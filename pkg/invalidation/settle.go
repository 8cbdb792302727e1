package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// Ending is how one run of an entry ended. Make one with Done, Retry, Fail, Release, Postpone, Yield,
// Expire or Cancel.
type Ending struct {
	Lock  *Lock
	Entry EntryID
	// Last says that the lock covers nothing more that the node will run: the lock record goes with this ending.
	// Entries of the key that are left (or came meanwhile) get a ready row.
	Last bool

	verb     verb
	result   json.RawMessage
	failure  Failure
	delay    time.Duration
	started  bool // of a release: start_by binds the entry no more
	reason   string
	throttle throttleOrder
	ran      time.Duration
	meta     json.RawMessage // see Run.Note
}

type verb int

const (
	verbDone verb = iota
	verbRetry
	verbFail
	verbRelease
	verbPostpone
	verbYield
	verbExpire
	verbCancel
)

// Verb names the ending: done, retry, fail, release, postpone, yield, expire or cancel.
func (e *Ending) Verb() string {
	return [...]string{"done", "retry", "fail", "release", "postpone", "yield", "expire", "cancel"}[e.verb]
}

// Bytes is about how much the ending takes on its way to the database.
func (e *Ending) Bytes() int {
	return len(e.result) + len(e.meta) + len(e.failure.Error) + len(e.failure.meta)
}

// Settle records endings of entries that this node runs, all in one short transaction, and returns
// the tokens of locks that this node still held. An ending under any other token is refused: it
// changes nothing, and the caller drops the result. An ending that was settled before is refused as
// well, without harm, so that after an ambiguous error the caller simply settles again.
func (q *Queue) Settle(ctx context.Context, node NodeID, endings []Ending) (ours []Token, err error) {
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
	c := pick(endings, verbDone, verbRetry, verbFail, verbRelease, verbPostpone, verbYield, verbExpire, verbCancel)
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
// does; with lock_not_available, ours are settled.
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
	return errors.As(err, &pg) && (pg.Code == entryChanged || pg.Code == "23514" && pg.ConstraintName == "")
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
	q.queueHold(batch, endings, lockTimeout, &s.ours)
	q.queueCallbacks(batch, endings) // while the entries are still there
	q.queueDone(batch, node, endings, byTID, &s.done)
	q.queueRetry(batch, node, endings)
	q.queueFail(batch, node, endings)
	q.queueRefund(batch, endings) // while cancelled entries are still there: once for each
	q.queueRemove(batch, node, endings)
	q.queueStarted(batch, endings)
	q.queueThrottles(batch, endings)
	q.queueUnlock(batch, endings)
	if err := q.db.SendBatch(ctx, batch).Close(); err != nil {
		return settled{}, q.errorf("settle entries of", err)
	}
	return s, nil
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

func (q *Queue) queueHold(batch *pgx.Batch, endings []Ending, lockTimeout *string, ours *[]Token) {
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

// unlockSQL ends locks $2 with tokens $3 and inserts ready rows for keys with more entries that are not blocked. $4
// is the position: the one that the key had ("front"), behind all others ("back", also for a key that used up its
// quantum of $5 entries), or that of its oldest entry ("oldest"). $6 is for how long (ms) it may not be
// claimed; 0 for at once. The statement returns the keys that are ready again, of solo entries too, and their lanes
// and positions, also where a concurrent push had inserted a ready row: claimers may have skipped it while the key was
// locked. No hint tells of these rows: the node that ended the lock goes back to them.
const unlockSQL = `
WITH freed AS (
    DELETE FROM penstock.lock d
     USING unnest($2::text[], $3::bigint[], $4::text[], $6::bigint[]) k(lock_key, token, requeue, delay_ms)
     CROSS JOIN LATERAL (
           SELECT ctid AS row FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key
               AND token = k.token OFFSET 0) l
     WHERE d.ctid = l.row
    RETURNING d.lock_key, d.pos, d.priority, d.flow, d.last_entry_id, d.entry_count, k.requeue,
              CASE WHEN k.delay_ms > 0 THEN clock_timestamp() + k.delay_ms * interval '1 millisecond' END AS not_before
), solo AS MATERIALIZED (
    SELECT e.priority, e.flow, f.pos, e.id, f.lock_key, f.not_before
      FROM freed f
     CROSS JOIN LATERAL (SELECT * FROM penstock.entry_X WHERE queue_id = $1 AND id = f.last_entry_id OFFSET 0) e
     WHERE left(f.lock_key, 1) = '#' AND penstock.claimable(e.status, e.priority)
), again_solo AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, not_before)
    SELECT $1, priority, flow, pos, id, not_before FROM solo
    ON CONFLICT DO NOTHING
), more AS MATERIALIZED (
    SELECT CASE f.requeue WHEN 'front' THEN greatest(f.priority, n.priority) ELSE n.priority END AS priority,
           CASE f.requeue WHEN 'front' THEN f.flow ELSE n.flow END AS flow,
           CASE WHEN f.requeue = 'front' THEN f.pos
                WHEN f.requeue = 'back' OR f.entry_count >= $5::int THEN nextval('penstock.entry_id_seq')
                ELSE n.id END AS pos, f.lock_key, f.not_before
      FROM freed f
     CROSS JOIN LATERAL (
           SELECT min(id) AS id, max(priority) AS priority, (array_agg(flow ORDER BY id))[1] AS flow
             FROM (SELECT id, priority, flow FROM penstock.entry_X
                    WHERE lock_key = f.lock_key AND penstock.claimable(status, priority)
                    ORDER BY id LIMIT $5::int) e) n
     WHERE left(f.lock_key, 1) <> '#' AND n.id IS NOT NULL
       AND (SELECT b.entry_id FROM penstock.blocked_key b WHERE b.queue_id = $1 AND b.lock_key = f.lock_key) IS NULL
), again AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key, not_before)
    SELECT $1, priority, flow, pos, lock_key, not_before FROM more
    ON CONFLICT DO NOTHING
)
SELECT lock_key, priority, flow, pos AS position FROM more
UNION ALL
SELECT lock_key, priority, flow, pos FROM solo`

func (q *Queue) queueUnlock(batch *pgx.Batch, endings []Ending) {
	var keys []string
	var tokens []Token
	var requeues []string
	var delays []int64 // ms
	for _, e := range endings {
		if e.verb == verbRelease {
			e.Lock.handedBack, e.Lock.delay = true, max(e.Lock.delay, e.delay)
		}
	}
	for _, e := range endings {
		if e.Last {
			keys, tokens = append(keys, e.Lock.Key), append(tokens, e.Lock.Token)
			requeues, delays = append(requeues, e.requeue()), append(delays, e.Lock.delay.Milliseconds())
		}
	}
	if len(keys) == 0 {
		return
	}
	batch.Queue(q.sql.unlock, q.ID, keys, tokens, requeues, q.Config.QuantumCount,
		delays).Query(func(rows pgx.Rows) error {
		var key string
		var at LaneHead
		_, err := pgx.ForEachRow(rows, []any{&key, &at.Priority, &at.Flow, &at.Position}, func() error {
			for _, e := range endings {
				if e.Last && e.Lock.Key == key {
					head := at
					e.Lock.Requeued = &head
				}
			}
			return nil
		})
		return err
	})
}

// EndsLock reports whether nothing more of the lock may run after the ending: an entry that is handed back takes
// those behind it along, or they would overtake it, and a failure blocks the key where the queue says so.
func (q *Queue) EndsLock(e *Ending) bool {
	return e.verb == verbRelease || e.verb == verbFail && q.Config.OnFailure == OnFailureBlockKey
}

// Failed says that the ending moves the entry to the failures.
func (e *Ending) Failed() bool { return e.verb == verbFail }

// requeue is the position of the key if it has more entries: front, back or oldest. Of entries that run together any
// may be handed back, not the last alone.
func (e *Ending) requeue() string {
	switch {
	case e.verb == verbYield:
		return "back"
	case e.Lock.handedBack:
		return "front"
	case e.Lock.quantum > 0 && e.Lock.counted >= e.Lock.quantum: // of large entries less than the queue's quantum
		return "back"
	default:
		return "oldest"
	}
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

// columns lays the endings of one verb out as arrays, the shape that their statement takes.
type columns struct {
	keys    []string
	tokens  numbers
	ids     numbers
	ran     numbers // milliseconds
	endings []*Ending
}

func pick(endings []Ending, verbs ...verb) columns {
	n := 0
	for i := range endings {
		if slices.Contains(verbs, endings[i].verb) {
			n++
		}
	}
	c := columns{
		make([]string, 0, n), make(numbers, 0, n), make(numbers, 0, n), make(numbers, 0, n),
		make([]*Ending, 0, n),
	}
	for i := range endings {
		e := &endings[i]
		if slices.Contains(verbs, e.verb) {
			c.keys, c.tokens, c.ids = append(c.keys, e.Lock.Key), append(c.tokens, number(e.Lock.Token)),
				append(c.ids, number(e.Entry))
			c.ran, c.endings = append(c.ran, number(e.ran.Milliseconds())), append(c.endings, e)
		}
	}
	return c
}

// tids are those of the lock records and entries.
func (c columns) tids() (locks, entries tids) {
	for _, e := range c.endings {
		locks, entries = append(locks, e.Lock.tid), append(entries, e.Lock.tidOf(e.Entry))
	}
	return locks, entries
}

// numbers and tids are arrays for the wire. pgx would make a value on the heap of each element of a slice.
type (
	array[T any] []T
	numbers      = array[number]
	tids         = array[pgtype.TID]
)

// Dimensions implements pgtype.ArrayGetter.
func (a array[T]) Dimensions() []pgtype.ArrayDimension {
	return []pgtype.ArrayDimension{{Length: int32(len(a)), LowerBound: 1}}
}

// Index implements pgtype.ArrayGetter.
func (a array[T]) Index(i int) any { return &a[i] }

// IndexType implements pgtype.ArrayGetter.
func (a array[T]) IndexType() any { return new(T) }

type number int64

// Int64Value implements pgtype.Int64Valuer.
func (n *number) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}

func each[T any](c columns, field func(*Ending) T) []T {
	values := make([]T, len(c.endings))
	for i, e := range c.endings {
		values[i] = field(e)
	}
	return values
}
