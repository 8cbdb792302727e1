package invalidation

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

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
	// Limited says that the queue's limits left no room, or that it or the flow is pushed back (see PushBackQueue).
	// Wait is how long a token bucket needs or the push-back lasts, 0 if a lock must end.
	Limited bool
	Wait    time.Duration
	Whole   bool // of Limited: what all lanes of the queue share left no room, so that no other one is worth a try
	// Mark is the place in line from which the next claim of the lane may begin. It only saves walking over what
	// is dead already: a row may come in behind it, so begin at 0 about once a second.
	Mark int64
	Seen int // ready rows met
	Left int // ready rows met that could not be claimed: locked keys. Sweep them
	// Emptied says that there was nothing behind the rows met, and that all of them were claimed.
	Emptied bool
}

// Claim locks up to r.Limit groups and solo entries of a lane for a node and returns their entries.
// The caller may start them: the claim is committed when Claim returns. After an error it may have been committed
// nevertheless; Reclaim finds out.
func (q *Queue) Claim(ctx context.Context, r ClaimRequest) (Claimed, error) {
	if q.careful.in(r.Lane) {
		return q.claimOne(ctx, r, q.carefully)
	}
	c, err := q.claimOne(ctx, r, q.swiftly)
	if waits(err) {
		q.careful.be(r.Lane)
		return q.claimOne(ctx, r, q.carefully)
	}
	if err != nil || c.Left == 0 {
		return c, err
	}
	// There are keys in the lane. What the swift claim got stays; the rest is for the other form.
	q.careful.be(r.Lane)
	if r.Limit -= len(c.Locks); r.Limit == 0 {
		return c, nil
	}
	more, err := q.claimOne(ctx, r, q.carefully)
	if err != nil {
		// The first part is committed: Reclaim finds it with the rest, under the one claim id.
		return Claimed{}, err
	}
	more.Locks = append(c.Locks, more.Locks...)
	inLine(more.Locks)
	return more, nil
}

func (q *Queue) claimOne(ctx context.Context, r ClaimRequest, as form) (Claimed, error) {
	claimed, err := q.claim(ctx, r, []LaneHead{{Lane: r.Lane, Pos: r.From}}, as)
	if len(claimed) == 0 {
		return Claimed{Busy: true}, err
	}
	return claimed[0], err
}

// waits says that a claim in the swift form would have had to wait for somebody.
func waits(err error) bool {
	code := postgres.Code(err)
	return code == lockNotAvailable || code == uniqueViolation
}

// inLine puts locks in the order of their places: the statements find rows in the order of the disk.
func inLine(locks []*Lock) {
	if !slices.IsSortedFunc(locks, (*Lock).Compare) {
		slices.SortFunc(locks, (*Lock).Compare)
	}
}

const (
	lockNotAvailable = "55P03"
	uniqueViolation  = "23505"
)

// carefulFor is how long a lane that held keys, or locked ready rows, is claimed from in the careful form.
const carefulFor = 10 * time.Second

// manners remembers which lanes are to be claimed from in the careful form.
type manners struct {
	mu    sync.Mutex
	until map[Lane]time.Time
}

func (m *manners) in(l Lane) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Before(m.until[l])
}

func (m *manners) be(l Lane) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.until == nil || len(m.until) > 10_000 {
		m.until = map[Lane]time.Time{}
	}
	m.until[l] = time.Now().Add(carefulFor)
}

// form writes one of the statements of a claim of lanes, which have one priority, and its arguments.
type form func(r ClaimRequest, lanes []LaneHead) (sql string, args []any)

func (q *Queue) swiftly(r ClaimRequest, lanes []LaneHead) (string, []any) {
	sql, limited := q.sql.swift, q.sql.swiftLimited
	args := []any{q.ID, r.Lane.Priority, r.Lane.Flow, r.From, r.Limit, r.Node, r.ClaimID}
	if len(lanes) > 1 {
		sql, limited = q.sql.claimLanes, q.sql.claimLanesLimited
		args[2], args[3], _ = inColumns(r, lanes)
	}
	if len(q.limits) == 0 {
		return sql, args
	}
	return limited, append(args, q.limits, q.pace)
}

func (q *Queue) carefully(r ClaimRequest, lanes []LaneHead) (string, []any) {
	flows, places, stubborn := inColumns(r, lanes)
	args := []any{q.ID, r.Lane.Priority, flows, places, r.Limit, r.Node, r.ClaimID, q.Config.QuantumCount, stubborn}
	if len(q.limits) == 0 {
		return q.sql.claim, args
	}
	sql := q.sql.claimLimited
	if q.pace > 1 {
		sql = q.sql.claimKeyed
	}
	return sql, append(args, q.limits, q.pace)
}

// inColumns are lanes as a statement takes them. Those after the first are claimed stubbornly from their beginning.
func inColumns(r ClaimRequest, lanes []LaneHead) (flows []string, places []int64, stubborn []bool) {
	for i, l := range lanes {
		flows, places = append(flows, l.Flow), append(places, l.Pos)
		stubborn = append(stubborn, i == 0 && r.Stubborn || i > 0 && l.Pos == 0)
	}
	return flows, places, stubborn
}

// claim claims from lanes in one transaction, and returns how it found them, as far as it came.
func (q *Queue) claim(ctx context.Context, r ClaimRequest, lanes []LaneHead, as form) ([]Claimed, error) {
	claimed, groups, err := q.readClaim(ctx, r, lanes, as)
	if postgres.Code(err) == entryChanged { // a limit must be counted that need not a moment ago, see penstock.charge
		return []Claimed{{Busy: true}}, nil
	}
	if err != nil {
		return nil, q.errorf("claim from", err)
	}
	if len(groups) > 0 {
		if err := q.readGroups(ctx, groups); err != nil {
			return nil, err
		}
		if groups, err = q.handBackEmpty(ctx, r.Node, groups); err != nil {
			return nil, err
		}
	}
	at := make(map[Lane]int, len(claimed))
	for i := range claimed {
		at[lanes[i].Lane] = i
	}
	for _, l := range groups {
		c := &claimed[at[l.Lane]]
		c.Locks = append(c.Locks, l)
	}
	for i := range claimed {
		inLine(claimed[i].Locks)
	}
	return claimed, nil
}

// readClaim sends a claim and returns its solo locks whole, and those of groups without their entries.
func (q *Queue) readClaim(ctx context.Context, r ClaimRequest, lanes []LaneHead, as form) (claimed []Claimed, groups []*Lock, err error) {
	start := time.Now()
	sql, args := as(r, lanes)
	index := make(map[string]int, len(lanes))
	for i, l := range lanes {
		index[l.Flow] = i
	}
	claimed, came, met := make([]Claimed, len(lanes)), 0, 0
	if len(lanes) == 1 {
		claimed[0].Locks = make([]*Lock, 0, min(r.Limit, 1000))
	}
	var solo slab
	var row claimRow
	_, err = pgx.ForEachRow(postgres.Query(ctx, q.db, sql, args...), row.lock(), func() error {
		at := index[row.flow.String] // that of a lane alone may not be named
		switch c := &claimed[at]; {
		case row.token == 0:
			c.summary(&row, r.Limit)
			solo.place(row.rows)
			r.Limit = min(r.Limit, int(max(1, row.entry.Cost))) // the room that the queue's limits left
			came, met = max(came, at+1), met+max(1, c.Seen)
		case row.key.Valid:
			groups = append(groups, &Lock{Key: row.key.String, Token: row.token, Lane: lanes[at].Lane, ClaimedAt: start, pos: row.pos})
		default:
			c.Locks = append(c.Locks, solo.lock(&row, lanes[at].Lane, start))
		}
		return nil
	})
	for i := range claimed[:came] { // the limit may have cut the last lane short
		claimed[i].Emptied = claimed[i].Emptied && (i < came-1 || claimed[i].Seen == 0 || met < r.Limit)
	}
	// The claim is committed when all has been read.
	return claimed[:came], groups, err
}

// slab hands out locks of one entry each from blocks of memory, which costs less than one by one.
type slab struct {
	locks   []Lock
	entries []Entry
	given   []*Lock
}

func (s *slab) lock(row *claimRow, lane Lane, claimed time.Time) *Lock {
	const block = 32
	if len(s.locks) == 0 {
		s.locks, s.entries = make([]Lock, block), make([]Entry, block)
	}
	l := &s.locks[0]
	s.entries[0] = *row.settled()
	*l = Lock{Key: soloKey(row.entry.ID), Token: row.token, Lane: lane, Entries: s.entries[:1:1], ClaimedAt: claimed, pos: row.pos}
	s.locks, s.entries, s.given = s.locks[1:], s.entries[1:], append(s.given, l)
	return l
}

// place tells the locks given out where their records stand.
func (s *slab) place(rows []pgtype.TID) {
	if len(rows) == len(s.given) {
		for i, l := range s.given {
			l.row = rows[i]
		}
	}
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

func (c *Claimed) summary(row *claimRow, limit int) {
	c.Mark, c.Seen, c.Busy, c.Left = row.pos, int(row.entry.ID), row.entry.Attempt == 0, row.entry.Crashes
	if room := row.startIn; room.Valid {
		limit = min(limit, int(room.Float64))
		if room.Float64 < 1 {
			c.Limited, c.Whole = true, row.entry.Cost < 1
			c.Wait = time.Duration(row.waited.Float64 * float64(time.Second))
		}
	}
	c.Emptied = !c.Busy && c.Seen < limit && c.Left == 0
}

// claimRow is where the rows of a claim are scanned to, one after another: one for all, and without pointers to be made,
// since what a scan leaves behind is garbage.
type claimRow struct {
	token                     Token
	pos                       int64
	key, name, trace          pgtype.Text
	entry                     Entry
	waited, startIn, finishIn pgtype.Float8
	rows                      pgtype.FlatArray[pgtype.TID]
	flow                      pgtype.Text
}

// lock is where the columns of a claim go, covered those of an entry that is read after the claim.
func (c *claimRow) lock() []any {
	return append(append([]any{(*int64)(&c.token), &c.pos, (*int64)(&c.entry.ID), &c.key}, c.columns()...), &c.rows, &c.flow)
}

func (c *claimRow) covered() []any {
	return append([]any{(*int64)(&c.token), (*int64)(&c.entry.ID)}, c.columns()...)
}

func (c *claimRow) columns() []any {
	e := &c.entry
	return []any{
		&e.Attempt, &e.Crashes, &e.Cost, &c.name, &c.trace, (*[]byte)(&e.Callback), (*[]byte)(&e.Payload),
		&c.waited, &c.startIn, &c.finishIn, &e.row,
	}
}

// settled is the entry, with SQL's nulls turned into its words, until the next row is scanned.
func (c *claimRow) settled() *Entry {
	e := &c.entry
	e.Name, e.Trace = c.name.String, c.trace.String
	e.Waited = time.Duration(c.waited.Float64 * float64(time.Second))
	e.StartIn, e.FinishIn = remaining(c.startIn), remaining(c.finishIn)
	return e
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
	_, err := pgx.ForEachRow(postgres.Query(ctx, q.db, q.sql.claimGroups, q.ID, keys, tokens, q.Config.QuantumCount), row.covered(), func() error {
		l := byToken[row.token]
		l.Entries = append(l.Entries, *row.settled())
		return nil
	})
	return q.errorf("read groups claimed from", err)
}
