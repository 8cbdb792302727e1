package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// laneReport is the state of a lane that a claim reached, as the statement reports it.
type laneReport struct {
	Exclusive bool  `json:"exclusive"` // no other claimer was in the lane
	Position  int64 `json:"position"`  // of the last ready row that was scanned, 0 for none
	Scanned   int   `json:"scanned"`   // ready rows
	Skipped   int   `json:"skipped"`   // of these, rows that were not claimed
	// seconds until a token bucket has enough, or the throttling ends; null for neither
	Wait *float64 `json:"wait"`
	// seconds until the first of the rows that were handed back for a while; null for none
	DueIn     *float64 `json:"due_in"`
	Headroom  int      `json:"headroom"`   // locks that the request and the limits left to the lane
	Shared    int      `json:"shared"`     // locks that they left to all lanes together
	QueueWide bool     `json:"queue_wide"` // a limit that all lanes share has no headroom
}

// claimed is the report as the caller of a claim sees it.
func (r *laneReport) claimed() Claimed {
	c := Claimed{LowWater: r.Position, Scanned: r.Scanned, Contended: !r.Exclusive, Skipped: r.Skipped}
	if r.Headroom < 1 {
		c.Limited, c.QueueWide = true, r.QueueWide
		if r.Wait != nil {
			c.Wait = time.Duration(*r.Wait * float64(time.Second))
		}
	}
	if r.DueIn != nil {
		c.DueIn = time.Duration(max(0.001, *r.DueIn) * float64(time.Second))
	}
	c.Drained = !c.Contended && c.Scanned < r.Headroom && c.Skipped == 0
	return c
}

// oneLaneReport is the report on a lane of which oneLaneSQL claimed all ready rows that it scanned, up to
// limit.
func oneLaneReport(locks []*Lock, limit int) laneReport {
	r := laneReport{Exclusive: true, Scanned: len(locks), Headroom: limit, Shared: limit}
	for _, l := range locks {
		r.Position = max(r.Position, l.position)
	}
	return r
}

// reports are the lanes that a claim reached, in their order.
type reports []laneReport

// claimed are the reports as the caller sees them. The limit of the claim may have cut the scan of the last
// lane short: then that one is not drained.
func (r reports) claimed(limit int) []Claimed {
	list := make([]Claimed, len(r))
	reached := 0
	for i := range r {
		list[i] = r[i].claimed()
		reached += max(1, r[i].Scanned)
		limit = min(limit, max(1, r[i].Shared))
	}
	if n := len(list); n > 0 && list[n-1].Scanned > 0 && reached >= limit {
		list[n-1].Drained = false
	}
	return list
}

// readClaim sends a claim and returns its solo locks whole, and those of groups without their entries.
func (q *Queue) readClaim(ctx context.Context, r ClaimRequest, lanes []LaneHead,
	form claimForm,
) (claimed []Claimed, groups []*Lock, err error) {
	start := time.Now()
	sql, args := form(r, lanes)
	index := make(map[string]int, len(lanes))
	for i, l := range lanes {
		index[l.Flow] = i
	}
	locks := make([][]*Lock, len(lanes))
	if len(lanes) == 1 {
		locks[0] = make([]*Lock, 0, min(r.Limit, 1000))
	}
	var solo slab
	var row claimRow
	var found reports
	_, err = pgx.ForEachRow(postgres.Query(ctx, q.db, sql, args...), row.lock(), func() error {
		if !row.token.Valid {
			solo.located(row.lockTIDs)
			return found.read(row.lanes)
		}
		at := index[row.flow.String]
		lock := Lock{
			Token: Token(row.token.Int64), Lane: lanes[at].Lane, ClaimedAt: start,
			position: row.position.Int64,
		}
		if row.key.Valid {
			group := lock
			group.Key = row.key.String
			groups = append(groups, &group)
		} else {
			locks[at] = append(locks[at], solo.add(lock, row.entry()))
		}
		return nil
	})
	// The claim is committed when all has been read.
	if found == nil && len(locks[0]) > 0 {
		found = reports{oneLaneReport(locks[0], r.Limit)}
	}
	claimed = found.claimed(r.Limit)
	for i := range claimed {
		claimed[i].Locks = locks[i]
	}
	return claimed, groups, err
}

func (r *reports) read(text []byte) error {
	if text == nil {
		return nil
	}
	if err := json.Unmarshal(text, r); err != nil {
		return fmt.Errorf("read report on lanes: %w", err)
	}
	return nil
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
	cost                      pgtype.Float8
	callback, payload         []byte
	waited, startIn, finishIn pgtype.Float8
	tid                       pgtype.TID
	flow                      pgtype.Text
	lockTIDs                  pgtype.FlatArray[pgtype.TID]
	lanes                     []byte
}

// lock are the columns of a claim, covered those of an entry that is read after the claim.
func (c *claimRow) lock() []any {
	columns := append([]any{&c.token, &c.position, &c.id, &c.key}, c.columns()...)
	return append(columns, &c.flow, &c.lockTIDs, &c.lanes)
}

func (c *claimRow) covered() []any {
	return append([]any{&c.token, &c.id}, c.columns()...)
}

func (c *claimRow) columns() []any {
	return []any{
		&c.attempt, &c.crashes, &c.cost, &c.name, &c.trace, &c.callback, &c.payload, &c.waited, &c.startIn, &c.finishIn,
		&c.tid,
	}
}

// entry is the entry of the row that was scanned last.
func (c *claimRow) entry() Entry {
	return Entry{
		ID: EntryID(c.id.Int64), Payload: c.payload, Name: c.name.String, Attempt: int(c.attempt.Int32),
		Crashes: int(c.crashes.Int32),
		Cost:    c.cost.Float64, Trace: c.trace.String, Callback: c.callback,
		Waited:  time.Duration(c.waited.Float64 * float64(time.Second)),
		StartIn: remaining(c.startIn), FinishIn: remaining(c.finishIn), tid: c.tid,
	}
}

func remaining(seconds pgtype.Float8) time.Duration {
	if !seconds.Valid {
		return NoDeadline
	}
	return time.Duration(min(max(seconds.Float64, -1e9), 9e9) * float64(time.Second))
}

// readGroups fills in the entries of locked groups.
func (q *Queue) readGroups(ctx context.Context, groups []*Lock) error {
	byToken := make(map[Token]*Lock, len(groups))
	keys, tokens := make([]string, len(groups)), make([]Token, len(groups))
	for i, g := range groups {
		byToken[g.Token], keys[i], tokens[i] = g, g.Key, g.Token
	}
	var row claimRow
	var counted int32
	rows := postgres.Query(ctx, q.db, q.sql.claimGroups, q.ID, keys, tokens, q.Config.QuantumCount)
	_, err := pgx.ForEachRow(rows, append(row.covered(), &counted), func() error {
		l := byToken[Token(row.token.Int64)]
		l.counted = int(counted)
		if row.id.Valid {
			l.Entries = append(l.Entries, row.entry())
		}
		return nil
	})
	return q.errorf("read groups claimed from", err)
}
