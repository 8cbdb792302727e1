package invalidation

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// claimSQL takes up to $5 ready rows of lane ($1 queue, $2 priority, $3 flow) from place $4 on, and puts lock
// records of node $6, claim $7 in their place. $8 is the queue's quantum in entries, $9 is stubborn (see Claim).
//
// Claims of a lane exclude each other by a transaction-scoped try-lock: another claimer goes on to the next lane
// instead of waiting. That is for speed alone; a ready row can be deleted but once, and a key has but one lock.
//
// A ready row that somebody else has locked is passed by, a group's that is locked by a pusher (see push_many) is
// claimed without it when we are stubborn. A key is tried only under a try-lock of its own, so that the insert of
// its lock never waits and the token it draws is larger than that of any earlier lock of the key.
//
// Sets of this statement meet in "IN (...) IS TRUE", which Postgres answers from a hash table; internal/postgres
// says why they do not meet in joins.
//
// For groups only key and token come back: the entries must be read after this commits (claimGroupsSQL), for the
// snapshot here may be older than the finish that freed the key. The last row says how the lane looked:
// token 0, pos the last place seen, id the rows seen, attempt 1 if we were alone, crashes the rows left behind,
// and what the queue's limits left: how long to wait for a token bucket (s), and room for how many locks.
const claimSQL = `
WITH alone AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || $3::text, 0))
           AND /* admission */ AS ok
), room AS MATERIALIZED (
    SELECT /* room */ FROM alone WHERE ok
), head AS MATERIALIZED (
    SELECT r.*
      FROM alone CROSS JOIN LATERAL (
           SELECT ready.ctid AS row, pos, lock_key
             FROM penstock.ready
            WHERE alone.ok AND queue_id = $1 AND priority = $2 AND flow = $3 AND pos >= $4::bigint
            ORDER BY pos
            LIMIT (SELECT locks FROM room)) r
), mine AS MATERIALIZED (
    SELECT ctid AS row, pos, entry_id
      FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head)) AND queue_id = $1
       FOR UPDATE SKIP LOCKED
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, e.id, e.attempt, e.crashes, e.cost, e.created_at, e.start_by,
           e.finish_by, e.name, e.trace, e.callback, e.payload
      FROM mine m
     CROSS JOIN LATERAL (SELECT * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), groups AS MATERIALIZED (
    SELECT DISTINCT ON (h.lock_key) h.lock_key, h.pos, c.entries, c.last_id, c.cost
      FROM head h
     CROSS JOIN LATERAL (
           SELECT count(*) AS entries, max(id) AS last_id, sum(coalesce(cost, 1)) AS cost
             FROM (SELECT id, cost FROM penstock.entry_X
                    WHERE lock_key = h.lock_key AND status = 'pending' AND priority >= 0
                    ORDER BY id LIMIT $8::int) q) c
     WHERE h.lock_key IS NOT NULL
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = h.lock_key) IS NULL
       AND (h.pos IN (SELECT pos FROM mine) OR ($9::boolean AND c.entries > 0))
     ORDER BY h.lock_key, h.pos
), lock_solo AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), $2, $3, clock_timestamp()
      FROM solo
    ON CONFLICT DO NOTHING
    RETURNING token, pos
), lock_group AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, lock_key, nextval('penstock.token_seq'), $6, $7, pos, coalesce(last_id, 0), entries, coalesce(cost, 1), $2, $3, clock_timestamp()
      FROM groups
     WHERE pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || lock_key, 0))
    ON CONFLICT DO NOTHING
    RETURNING token, pos, lock_key, last_entry_id
), taken AS (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM mine
                              WHERE (pos IN (SELECT pos FROM lock_solo UNION ALL SELECT pos FROM lock_group)) IS TRUE))
       AND queue_id = $1
    RETURNING pos
)/* spent */
SELECT token, pos, id, NULL::text, attempt, crashes, coalesce(cost, 0), name, trace, callback, payload,
       date_part('epoch', clock_timestamp() - created_at),
       date_part('epoch', start_by - clock_timestamp()), date_part('epoch', finish_by - clock_timestamp())
  FROM solo
 WHERE (token IN (SELECT token FROM lock_solo)) IS TRUE
UNION ALL
SELECT token, pos, last_entry_id, lock_key, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
  FROM lock_group
UNION ALL
SELECT 0, (SELECT coalesce(max(pos), 0) FROM head), (SELECT count(*) FROM head), NULL, (SELECT ok::int FROM alone),
       (SELECT count(*) FROM head)::int - (SELECT count(*) FROM taken)::int, 0, NULL, NULL, NULL, NULL,
       (SELECT wait FROM room), (SELECT locks FROM room)::float8, NULL /* spending */`

// A queue under limits claims with the second form of the statement, which runs behind gatesSQL in one transaction:
// that locks the rows of its limits, so that claims under a limit go one after another, and the claim, whose
// snapshot is younger than that, counts the locks in use exactly. Both forms look whether the limits are those that
// the queue knew of when it was opened; if not, nothing is claimed.
var (
	claimFreeSQL = strings.NewReplacer(
		"/* admission */", "NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)",
		"/* room */", "$5::int AS locks, 0::float8 AS wait",
	).Replace(claimSQL)
	claimLimitedSQL = strings.NewReplacer(
		"/* admission */", `(SELECT array_agg(u.limit_id ORDER BY u.limit_id) FROM penstock.limit_use u WHERE u.queue_id = $1) = $10::int[]
           AND (SELECT count(*) FROM (SELECT FROM penstock."limit" WHERE id = ANY ($10::int[]) FOR UPDATE SKIP LOCKED) g) = cardinality($10::int[])`,
		"/* room */", "least($5::int, r.room) AS locks, r.wait",
		"FROM alone WHERE ok\n", "FROM alone CROSS JOIN LATERAL penstock.limit_room($1, $3) r WHERE ok\n",
		"/* spent */", `, spent AS MATERIALIZED (
    SELECT penstock.spend($1, $3, (SELECT count(*) FROM lock_solo) + (SELECT count(*) FROM lock_group)) AS done
)`,
		"NULL /* spending */", "(SELECT 0 FROM spent)",
	).Replace(claimSQL)
)

// gatesSQL locks limits $1, as many as nobody else holds, until the transaction ends.
const gatesSQL = `SELECT id FROM penstock."limit" WHERE id = ANY ($1::int[]) ORDER BY id FOR UPDATE SKIP LOCKED`

// claimGroupsSQL reads the entries of groups that a claim has locked: keys $2 with tokens $3.
const claimGroupsSQL = `
SELECT l.token, e.id, e.attempt, e.crashes, coalesce(e.cost, 0), e.name, e.trace, e.callback, e.payload,
       date_part('epoch', clock_timestamp() - e.created_at),
       date_part('epoch', e.start_by - clock_timestamp()), date_part('epoch', e.finish_by - clock_timestamp())
  FROM unnest($2::text[], $3::bigint[]) k(lock_key, token)
  CROSS JOIN LATERAL (
       SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
  CROSS JOIN LATERAL (
       SELECT * FROM penstock.entry_X
        WHERE lock_key = l.lock_key AND status = 'pending' AND priority >= 0 AND id <= l.last_entry_id
        ORDER BY id LIMIT $4::int) e`

// ClaimRequest says what a node would take from one lane.
type ClaimRequest struct {
	Node    NodeID
	ClaimID int32 // a number the node never used before in this incarnation
	Lane    Lane
	From    int64 // place in line to begin at: a hint, see Claimed.Mark; 0 for the head
	Limit   int   // locks
	// Stubborn claims a key even while a pusher holds its ready row. A claimer that comes by about once a second
	// with this set keeps a long transaction of a pusher from holding up the entries that came before it.
	Stubborn bool
}

// Claimed is what a claim brought.
type Claimed struct {
	Locks []*Lock
	Busy  bool // another claimer was in the lane, or holds a limit of the queue: try the next one
	// Limited says that the queue's limits left no room. Wait is how long a token bucket needs, 0 if a lock must end.
	Limited bool
	Wait    time.Duration
	// Mark is the place in line from which the next claim of the lane may begin. It only saves walking over what
	// is dead already: a row may come in behind it, so begin at 0 about once a second.
	Mark int64
	Seen int // ready rows met; less than Limit means the lane is empty behind them
	Left int // ready rows met that could not be claimed: locked keys. Sweep them
}

// Claim locks up to r.Limit groups and solo entries of a lane for a node and returns their entries.
// The caller may start them: the claim is committed when Claim returns. After an error it may have been committed
// nevertheless; Reclaim finds out.
func (q *Queue) Claim(ctx context.Context, r ClaimRequest) (Claimed, error) {
	start := time.Now()
	rows, end, err := q.queryClaim(ctx, r)
	if err != nil {
		return Claimed{}, q.errorf("claim from", err)
	}
	c := Claimed{Locks: make([]*Lock, 0, r.Limit)}
	var groups []*Lock
	var solo slab
	var row claimRow // one for all: what a scan leaves behind would be garbage
	for rows.Next() {
		row = claimRow{}
		if err := row.scan(rows); err != nil {
			rows.Close()
			_ = end()
			return Claimed{}, q.errorf("claim from", err)
		}
		switch {
		case row.token == 0:
			c.summary(&row)
		case row.key != nil:
			groups = append(groups, &Lock{Key: *row.key, Token: row.token, Lane: r.Lane, ClaimedAt: start})
		default:
			l := solo.lock(row.entry)
			l.Key, l.Token, l.Lane, l.ClaimedAt = soloKey(row.entry.ID), row.token, r.Lane, start
			c.Locks = append(c.Locks, l)
		}
	}
	// Only now is the claim committed: the rows above arrived before.
	if err := errors.Join(rows.Err(), end()); err != nil {
		return Claimed{}, q.errorf("claim from", err)
	}
	if len(groups) > 0 {
		if err := q.readGroups(ctx, groups); err != nil {
			return Claimed{}, err
		}
		if groups, err = q.handBackEmpty(ctx, r.Node, groups); err != nil {
			return Claimed{}, err
		}
		c.Locks = append(c.Locks, groups...)
	}
	return c, nil
}

// slab hands out locks of one entry each from blocks of memory, which costs less than one by one.
type slab struct {
	locks   []Lock
	entries []Entry
}

func (s *slab) lock(e Entry) *Lock {
	const block = 32
	if len(s.locks) == 0 {
		s.locks, s.entries = make([]Lock, block), make([]Entry, block)
	}
	l := &s.locks[0]
	s.entries[0] = e
	l.Entries = s.entries[:1:1]
	s.locks, s.entries = s.locks[1:], s.entries[1:]
	return l
}

// handBackEmpty ends locks that cover nothing, and returns the others. The claim's snapshot may show entries of a
// key that ended before the claim locked it.
func (q *Queue) handBackEmpty(ctx context.Context, node NodeID, locks []*Lock) ([]*Lock, error) {
	var empty []Ending
	full := locks[:0]
	for _, l := range locks {
		if len(l.Entries) > 0 {
			full = append(full, l)
			continue
		}
		e := Release(l, 0, 0)
		e.Last = true
		empty = append(empty, e)
	}
	if len(empty) == 0 {
		return full, nil
	}
	_, err := q.Settle(ctx, node, empty)
	return full, err
}

// queryClaim sends the claim in the form that the queue's limits ask for. end must be called when the rows are read.
func (q *Queue) queryClaim(ctx context.Context, r ClaimRequest) (rows pgx.Rows, end func() error, err error) {
	args := []any{q.ID, r.Lane.Priority, r.Lane.Flow, r.From, r.Limit, r.Node, r.ClaimID, q.Config.QuantumCount, r.Stubborn}
	if len(q.limits) == 0 {
		rows, err = q.db.Query(ctx, q.sql.claim, args...)
		return rows, func() error { return nil }, err
	}
	batch := &pgx.Batch{}
	batch.Queue(gatesSQL, q.limits)
	batch.Queue(q.sql.claimLimited, append(args, q.limits)...)
	results := q.db.SendBatch(ctx, batch)
	if _, err := results.Exec(); err != nil {
		_ = results.Close()
		return nil, nil, err
	}
	rows, err = results.Query()
	return rows, results.Close, err
}

func (c *Claimed) summary(row *claimRow) {
	c.Mark, c.Seen, c.Busy, c.Left = row.pos, int(row.entry.ID), row.entry.Attempt == 0, row.entry.Crashes
	if row.startIn != nil && *row.startIn < 1 {
		c.Limited = true
		c.Wait = time.Duration(*row.waited * float64(time.Second))
	}
}

type claimRow struct {
	token                     Token
	pos                       int64
	key                       *string
	entry                     Entry
	name, trace               *string
	waited, startIn, finishIn *float64
}

func (c *claimRow) scan(row pgx.Rows) error {
	e := &c.entry
	if err := row.Scan(&c.token, &c.pos, &e.ID, &c.key, &e.Attempt, &e.Crashes, &e.Cost, &c.name, &c.trace,
		&e.Callback, &e.Payload, &c.waited, &c.startIn, &c.finishIn); err != nil {
		return err
	}
	c.settle()
	return nil
}

func (c *claimRow) scanGroup(row pgx.CollectableRow) error {
	e := &c.entry
	if err := row.Scan(&c.token, &e.ID, &e.Attempt, &e.Crashes, &e.Cost, &c.name, &c.trace,
		&e.Callback, &e.Payload, &c.waited, &c.startIn, &c.finishIn); err != nil {
		return err
	}
	c.settle()
	return nil
}

// settle turns SQL's nulls into the entry's words.
func (c *claimRow) settle() {
	e := &c.entry
	if c.name != nil {
		e.Name = *c.name
	}
	if c.trace != nil {
		e.Trace = *c.trace
	}
	if c.waited != nil {
		e.Waited = time.Duration(*c.waited * float64(time.Second))
	}
	e.StartIn, e.FinishIn = remaining(c.startIn), remaining(c.finishIn)
}

func remaining(seconds *float64) time.Duration {
	if seconds == nil {
		return NoDeadline
	}
	return time.Duration(min(max(*seconds, -1e9), 9e9) * float64(time.Second))
}

// readGroups fills in the entries of locked groups.
func (q *Queue) readGroups(ctx context.Context, groups []*Lock) error {
	byToken := make(map[Token]*Lock, len(groups))
	keys, tokens := make([]string, len(groups)), make([]Token, len(groups))
	for i, g := range groups {
		byToken[g.Token], keys[i], tokens[i] = g, g.Key, g.Token
	}
	rows, err := q.db.Query(ctx, q.sql.claimGroups, q.ID, keys, tokens, q.Config.QuantumCount)
	if err != nil {
		return q.errorf("read groups claimed from", err)
	}
	entries, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (claimRow, error) {
		var c claimRow
		return c, c.scanGroup(row)
	})
	if err != nil {
		return q.errorf("read groups claimed from", err)
	}
	for _, c := range entries {
		byToken[c.token].Entries = append(byToken[c.token].Entries, c.entry)
	}
	return nil
}
