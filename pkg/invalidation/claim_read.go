package invalidation

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// laneReport is where the columns on a lane that a claim reached are scanned to. They are null in the row of a lock.
type laneReport struct {
	exclusive  pgtype.Bool   // no other claimer was in the lane
	scanned    pgtype.Int8   // ready rows
	skipped    pgtype.Int8   // of these, rows that were not claimed
	wait       pgtype.Float8 // seconds until a token bucket has enough, or the throttling ends; null for neither
	delayedFor pgtype.Float8 // seconds until the first of the rows that were handed back for a while; null for none
	headroom   pgtype.Int4   // locks that the request and the limits left to the lane
	shared     pgtype.Int4   // locks that they left to all lanes together
	queueWide  pgtype.Bool   // a limit that all lanes share has no headroom
}

func (r *laneReport) columns() []any {
	return []any{
		&r.exclusive, &r.scanned, &r.skipped, &r.wait, &r.delayedFor, &r.headroom, &r.shared, &r.queueWide,
	}
}

// claimed is the report as the caller of a claim sees it; position is that of the last ready row that was scanned.
func (r *laneReport) claimed(position int64) Claimed {
	c := Claimed{
		LowWater: position, Scanned: int(r.scanned.Int64), Skipped: int(r.skipped.Int64), TryLater: !r.exclusive.Bool,
	}
	if r.headroom.Int32 < 1 {
		c.Limited, c.QueueWide = true, r.queueWide.Bool
		c.Wait = time.Duration(r.wait.Float64 * float64(time.Second))
	}
	if r.delayedFor.Valid {
		c.DelayedFor = time.Duration(max(0.001, r.delayedFor.Float64) * float64(time.Second))
	}
	c.Drained = !c.TryLater && c.Scanned < int(r.headroom.Int32) && c.Skipped == 0
	return c
}

// reports are the lanes that a claim reached, a prefix of those that it asked for.
type reports struct {
	claimed []Claimed
	shared  int // the least that a report says was left to all lanes together
}

func (r *reports) add(at int, position int64, l *laneReport) {
	if at >= len(r.claimed) {
		r.claimed = append(r.claimed, make([]Claimed, at+1-len(r.claimed))...)
	}
	r.claimed[at] = l.claimed(position)
	r.shared = min(r.shared, max(1, int(l.shared.Int32)))
}

// lanes are the reports in the order of the lanes. The limit of the claim may have cut the scan of the last lane
// short: then that one is not drained.
func (r *reports) lanes() []Claimed {
	reached := 0
	for i := range r.claimed {
		reached += max(1, r.claimed[i].Scanned)
	}
	if n := len(r.claimed); n > 0 && r.claimed[n-1].Scanned > 0 && reached >= r.shared {
		r.claimed[n-1].Drained = false
	}
	return r.claimed
}

// readClaim sends a claim and returns its solo locks whole, and those of groups without their entries.
func (q *Queue) readClaim(ctx context.Context, r LanesRequest, form claimForm) (
	claimed []Claimed, groups []*Lock, err error,
) {
	start := time.Now()
	sql, args := form(r)
	index := make(map[string]int, len(r.Lanes))
	for i, l := range r.Lanes {
		index[l.Flow] = i
	}
	locks := make([][]*Lock, len(r.Lanes))
	if len(r.Lanes) == 1 {
		locks[0] = make([]*Lock, 0, min(r.Limit, 1000))
	}
	var solo slab
	var row claimRow
	found := reports{shared: r.Limit}
	_, err = pgx.ForEachRow(postgres.Query(ctx, q.db, sql, args...), row.claim(), func() error {
		at := index[row.flow.String]
		if !row.token.Valid {
			solo.located(row.lockTIDs)
			found.add(at, row.position.Int64, &row.lane)
			return nil
		}
		lock := Lock{
			Token: Token(row.token.Int64), Lane: r.Lanes[at].Lane, ClaimedAt: start,
			position: row.position.Int64,
		}
		if row.key.Valid {
			group := lock
			group.Key, group.quantum = row.key.String, r.quantum
			groups = append(groups, &group)
		} else {
			locks[at] = append(locks[at], solo.add(lock, row.entry()))
		}
		return nil
	})
	// The claim is committed when all has been read.
	claimed = found.lanes()
	for i := range claimed {
		claimed[i].Locks = locks[i]
	}
	return claimed, groups, err
}

// slab hands out locks of one entry each from blocks of memory, which costs less than one by one.
type slab struct {
	locks   []Lock
	entries []Entry
	given   []*Lock
}

func (s *slab) add(lock Lock, entry Entry) *Lock {
	const block = 32
	if len(s.locks) == 0 {
		s.locks, s.entries = make([]Lock, block), make([]Entry, block)
	}
	l := &s.locks[0]
	s.entries[0] = entry
	lock.Key, lock.Entries = soloKey(entry.ID), s.entries[:1:1]
	*l = lock
	s.locks, s.entries, s.given = s.locks[1:], s.entries[1:], append(s.given, l)
	return l
}

// located sets the tids of the lock records of the locks that were handed out.
func (s *slab) located(tids []pgtype.TID) {
	if len(tids) == len(s.given) {
		for i, l := range s.given {
			l.tid = tids[i]
		}
	}
}

// claimRow is where the rows of a claim are scanned to, one after another: one for all, and without pointers
// to be made, since what a scan leaves behind is garbage.
type claimRow struct {
	token, position, id       pgtype.Int8
	key, name, trace          pgtype.Text
	attempt, crashes          pgtype.Int4
	mayHaveRun                pgtype.Bool
	cost                      pgtype.Float8
	callback, payload         []byte
	waited, startIn, finishIn pgtype.Float8
	tid                       pgtype.TID
	flow                      pgtype.Text
	lockTIDs                  pgtype.FlatArray[pgtype.TID]
	lane                      laneReport
}

// claim are the columns of a claim, lock those of a lock, covered those of an entry that is read after the claim.
func (c *claimRow) claim() []any {
	return append(append(c.lock(), &c.lockTIDs), c.lane.columns()...)
}

func (c *claimRow) lock() []any {
	columns := append([]any{&c.token, &c.position, &c.id, &c.key}, c.columns()...)
	return append(columns, &c.flow)
}

func (c *claimRow) covered() []any {
	return append([]any{&c.token, &c.id}, c.columns()...)
}

func (c *claimRow) columns() []any {
	return []any{
		&c.attempt, &c.crashes, &c.mayHaveRun, &c.cost, &c.name, &c.trace, &c.callback, &c.payload,
		&c.waited, &c.startIn, &c.finishIn, &c.tid,
	}
}

// entry is the entry of the row that was scanned last.
func (c *claimRow) entry() Entry {
	return Entry{
		ID: EntryID(c.id.Int64), Payload: c.payload, Name: c.name.String, Attempt: int(c.attempt.Int32),
		Crashes: int(c.crashes.Int32), MayHaveRun: c.mayHaveRun.Bool,
		Cost: c.cost.Float64, Trace: c.trace.String, Callback: c.callback,
		Waited:  time.Duration(c.waited.Float64 * float64(time.Second)),
		StartBy: deadline(c.startIn), FinishBy: deadline(c.finishIn), tid: c.tid,
	}
}

// deadline is the time at which the seconds are over that were left when the database sent them. They count from their
// receipt: the statement may have waited for longer than that after it was sent.
func deadline(left pgtype.Float8) time.Time {
	if !left.Valid {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(min(max(left.Float64, -1e9), 9e9) * float64(time.Second)))
}

// claimGroupsSQL reads the entries of groups that a claim has locked: keys $2 with tokens $3, at most $4
// entries of each and no more than the claim counted and charged, though others may have been committed since
// with lower ids. A group without entries has one row without an entry: those that the claim counted had
// ended, or the key is blocked. A claim may take a blocked key, for its snapshot or a later push may show a ready
// row; none is left when the lock has been handed back. An entry that is heavier than those that the claim counted
// has a row as well, and ends the cover of the lock.
const claimGroupsSQL = `
SELECT l.token, e.id AS entry_id, e.attempt, e.crashes, e.may_have_run, coalesce(e.cost, 0) AS cost, e.name, e.trace,
       e.callback, e.payload,
       date_part('epoch', statement_timestamp() - e.created_at) AS waited,
       date_part('epoch', e.start_by - clock_timestamp()) AS start_in,
       date_part('epoch', e.finish_by - clock_timestamp()) AS finish_in, e.row AS entry_tid, l.entry_count,
       coalesce(e.weight > l.weight, false) AS heavier
  FROM unnest($2::text[], $3::bigint[]) k(lock_key, token)
 CROSS JOIN LATERAL (
       SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
  LEFT JOIN LATERAL (
       SELECT ctid AS row, * FROM penstock.entry_X
        WHERE lock_key = l.lock_key AND penstock.claimable(status, priority) AND id <= l.last_entry_id
          AND (SELECT b.entry_id FROM penstock.blocked_key b
                WHERE b.queue_id = $1 AND b.lock_key = l.lock_key) IS NULL
        ORDER BY id LIMIT least($4::int, l.entry_count)) e ON true`

// readGroups fills in the entries of locked groups.
func (q *Queue) readGroups(ctx context.Context, groups []*Lock) error {
	start := time.Now()
	byToken := make(map[Token]*Lock, len(groups))
	keys, tokens := make([]string, len(groups)), make([]Token, len(groups))
	for i, g := range groups {
		byToken[g.Token], keys[i], tokens[i] = g, g.Key, g.Token
	}
	var row claimRow
	var counted int32
	var heavier bool
	ended := map[Token]bool{} // an entry was heavier
	rows := postgres.Query(ctx, q.db, q.sql.claimGroups, q.ID, keys, tokens, q.Config.QuantumCount)
	_, err := pgx.ForEachRow(rows, append(row.covered(), &counted, &heavier), func() error {
		l := byToken[Token(row.token.Int64)]
		l.counted = int(counted)
		ended[l.Token] = ended[l.Token] || heavier
		if row.id.Valid && !ended[l.Token] {
			e := row.entry()
			e.Waited -= start.Sub(l.ClaimedAt) // it had waited for so long when this statement began
			l.Entries = append(l.Entries, e)
		}
		return nil
	})
	q.sizes.read(groups)
	return q.errorf("read groups claimed from", err)
}

// coverage is what locks of a claim cover.
type coverage struct {
	locks      []*Lock // those that cover entries
	unreadable error   // entries of groups cannot be read; all groups were handed back
}

// cover reads the entries of locked groups, gives back to token buckets what the claim counted beyond those, and ends
// the locks that cover nothing: the claim's snapshot may show entries of a key that ended before the claim locked it.
// These have Requeued set, see Settle.
func (q *Queue) cover(ctx context.Context, node NodeID, locks []*Lock) (c coverage, err error) {
	groups := slices.DeleteFunc(slices.Clone(locks), (*Lock).Solo)
	if len(groups) > 0 {
		c.unreadable = q.readGroups(ctx, groups)
		if c.unreadable != nil && !unreadable(c.unreadable) {
			return coverage{}, c.unreadable
		}
	}
	if c.unreadable != nil {
		for _, l := range groups {
			l.Entries = nil // some may not have been read
		}
	}
	if err := q.refundUncovered(ctx, locks); err != nil {
		return coverage{}, err
	}
	var empty []Ending
	for _, l := range locks {
		if len(l.Entries) > 0 {
			c.locks = append(c.locks, l)
			continue
		}
		e := Release(l, 0, 0)
		e.Last = true
		empty = append(empty, e)
	}
	if len(empty) > 0 {
		_, err = q.Settle(ctx, node, empty)
	}
	return c, err
}
