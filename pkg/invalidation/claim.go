package invalidation

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// ClaimRequest names the lane of a claim, the first one of ClaimLanes, and bounds its locks. Its fields on the lane are
// those of ClaimLane.
type ClaimRequest struct {
	Node           NodeID
	ClaimID        int32 // a number that the node never used before in this incarnation
	Lane           Lane
	From           int64
	Limit          int // locks
	IgnoreRowLocks bool

	quantum int // entries of a key under one lock
}

// ClaimLane is a lane to claim from.
type ClaimLane struct {
	Lane
	From int64 // position to begin at: a hint, see Claimed.LowWater; 0 for the head
	// IgnoreRowLocks claims a key even while a pusher has its ready row locked. A claim with this set about
	// once a second keeps a long transaction of a pusher from delaying the entries of the key that were
	// committed before.
	IgnoreRowLocks bool
}

// first is the lane of the request.
func (r *ClaimRequest) first() []ClaimLane { return []ClaimLane{{r.Lane, r.From, r.IgnoreRowLocks}} }

// Claimed is the answer to a claim: the locks of one lane, and the state of the lane.
type Claimed struct {
	Locks []*Lock
	// TryLater reports that the claim took nothing and does not know what the lane has: another claimer was in the
	// lane, or holds a limit of the queue exclusively; the limits are not those of this handle; a limit must be
	// counted, which the next claim does; or entries could not be read, and are failures now. Try another lane first.
	TryLater bool
	// Limited reports that the limits of the queue leave no headroom in the lane, or that the queue or the
	// flow is throttled (see ThrottleQueue). Wait is how long a token bucket needs or the throttling lasts; 0
	// if a lock must end first.
	Limited bool
	Wait    time.Duration
	// QueueWide, of Limited: the limit is shared by all lanes of the queue, so that no other lane is worth a claim.
	QueueWide bool
	// LowWater is the position from which the next claim of the lane may begin, which saves it a walk over
	// dead rows. A row may come in behind it: begin at 0 about once a second.
	LowWater int64
	Scanned  int // ready rows
	Skipped  int // ready rows that could not be claimed, since their keys are locked: Sweep deletes them
	// DelayedFor is how long the ready rows of the lane are delayed, where all of them are; 0 if none is. See
	// NoCapacity.
	DelayedFor time.Duration
	// Drained reports that there was no ready row behind the scanned ones, and that all of them were claimed.
	Drained bool
}

// Claim is ClaimLanes for r.Lane alone: it locks up to r.Limit groups and solo entries of the lane for a node and
// returns their entries.
// The caller may start them: the claim is committed when Claim returns. After an error it may have been committed
// nevertheless; Reclaim finds out.
func (q *Queue) Claim(ctx context.Context, r ClaimRequest) (Claimed, error) {
	if q.weighed() || q.policy.locksFirst(r.Lane) {
		return q.claimOne(ctx, r, q.lockFirst)
	}
	c, usual, err := q.claimUsual(ctx, r)
	if !usual && err == nil {
		c, err = q.claimOne(ctx, r, q.deleteFirst)
	}
	if wouldWait(err) {
		q.policy.lockFirst(r.Lane)
		return q.claimOne(ctx, r, q.lockFirst)
	}
	if err != nil || c.Skipped == 0 {
		return c, err
	}
	// There are keys in the lane. The locks of the first statement stay; the other statement claims the rest.
	q.policy.lockFirst(r.Lane)
	r.Limit -= len(c.Locks)
	if r.Limit == 0 {
		return c, nil
	}
	more, err := q.claimOne(ctx, r, q.lockFirst)
	if err != nil {
		// The first part is committed: Reclaim finds it with the rest, under the one claim id.
		return Claimed{}, err
	}
	more.Locks = append(c.Locks, more.Locks...)
	sortLocks(more.Locks)
	return more, nil
}

// claimUsual claims by the shortest of the statements; usual says that it has claimed, or that another claimer is
// in the lane.
func (q *Queue) claimUsual(ctx context.Context, r ClaimRequest) (c Claimed, usual bool, err error) {
	if len(q.limits) > 0 {
		return Claimed{}, false, nil
	}
	claimed, err := q.claim(ctx, r, r.first(), q.oneLane)
	if err != nil || len(claimed) == 0 {
		return Claimed{}, false, err
	}
	return claimed[0], true, nil
}

func (q *Queue) claimOne(ctx context.Context, r ClaimRequest, form claimForm) (Claimed, error) {
	claimed, err := q.claim(ctx, r, r.first(), form)
	if len(claimed) == 0 {
		return Claimed{TryLater: true}, err
	}
	return claimed[0], err
}

// ClaimLanes is the claim of nodes. It claims from several lanes in one transaction: from that of the request, and then
// from those of along, which have the same priority. The rest of r.Limit that one lane leaves goes to the next. It
// returns the state of the lanes that it reached, at least one, in their order. Each lane that it reaches counts as a
// lock or more of the limit.
func (q *Queue) ClaimLanes(ctx context.Context, r ClaimRequest, along []ClaimLane) ([]Claimed, error) {
	lanes := r.first()
	for _, l := range along {
		if l.Priority != r.Lane.Priority {
			break
		}
		lanes = append(lanes, l)
	}
	if len(lanes) > 1 && !q.weighed() {
		claimed, err := q.claimTogether(ctx, r, lanes)
		if err != nil || len(claimed) > 0 {
			return claimed, err
		}
	}
	c, err := q.Claim(ctx, r)
	return []Claimed{c}, err
}

// claimTogether returns nothing where the lanes can only be claimed from one by one.
func (q *Queue) claimTogether(ctx context.Context, r ClaimRequest, lanes []ClaimLane) ([]Claimed, error) {
	keyed := slices.ContainsFunc(lanes, func(l ClaimLane) bool { return q.policy.locksFirst(l.Lane) })
	if keyed || q.policy.locksFirstTogether() || q.rates != rateNone {
		return q.claim(ctx, r, lanes, q.lockFirst)
	}
	claimed, err := q.claim(ctx, r, lanes, q.deleteFirst)
	if wouldWait(err) {
		q.policy.lockFirstTogether()
		return q.claim(ctx, r, lanes, q.lockFirst)
	}
	for i := range claimed {
		c := &claimed[i]
		if c.Skipped > 0 { // keys: the next claim locks first, and begins where this one began
			q.policy.lockFirstTogether()
			q.policy.lockFirst(lanes[i].Lane)
			c.Skipped, c.LowWater = 0, lanes[i].From-1
		}
	}
	return claimed, err
}

// wouldWait reports that a claim that deletes first met a row that another transaction has locked, or a lock record
// that another one has inserted. The claim that locks first passes both by.
func wouldWait(err error) bool {
	code := postgres.Code(err)
	return code == postgres.LockNotAvailable || code == postgres.UniqueViolation
}

// sortLocks sorts by position: the statements return rows in the order of the disk.
func sortLocks(locks []*Lock) {
	if !slices.IsSortedFunc(locks, (*Lock).Compare) {
		slices.SortFunc(locks, (*Lock).Compare)
	}
}

// lockFirstFor is how long a lane in which a claim met keys, or locked ready rows, is claimed from by the
// statement that locks first.
const lockFirstFor = 10 * time.Second

// lanePolicy remembers which claims are to use the statement that locks first: those of a lane, and those of several
// lanes together.
type lanePolicy struct {
	mu       sync.Mutex
	until    map[Lane]time.Time
	together time.Time // until then those of several lanes do
}

func (p *lanePolicy) locksFirst(l Lane) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Now().Before(p.until[l])
}

func (p *lanePolicy) lockFirst(l Lane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.until == nil || len(p.until) > 10_000 {
		p.until = map[Lane]time.Time{}
	}
	p.until[l] = time.Now().Add(lockFirstFor)
}

func (p *lanePolicy) locksFirstTogether() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Now().Before(p.together)
}

func (p *lanePolicy) lockFirstTogether() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.together = time.Now().Add(lockFirstFor)
}

// rateKind is the strongest kind of token bucket among the limits of a queue; penstock.queue_rate_kind returns it.
type rateKind int

const (
	rateNone   rateKind = iota // no limit has a rate
	rateShared                 // a rate for all entries or for each flow
	ratePerKey                 // a rate for each lock key
)

// claimForm returns one of the statements of a claim and its arguments.
type claimForm func(r ClaimRequest, lanes []ClaimLane) (sql string, args []any)

func (q *Queue) oneLane(r ClaimRequest, lanes []ClaimLane) (string, []any) {
	return q.sql.claim.oneLane, []any{
		q.ID, r.Lane.Priority, lanes[0].Flow, lanes[0].From, r.Limit, r.Node, r.ClaimID,
	}
}

func (q *Queue) deleteFirst(r ClaimRequest, lanes []ClaimLane) (string, []any) {
	flows, positions, _ := laneColumns(lanes)
	args := []any{q.ID, r.Lane.Priority, flows, positions, r.Limit, r.Node, r.ClaimID}
	if len(q.limits) == 0 {
		return q.sql.claim.deleteFirst, args
	}
	return q.sql.claim.deleteFirstLimited, append(args, q.limits, q.rates)
}

func (q *Queue) lockFirst(r ClaimRequest, lanes []ClaimLane) (string, []any) {
	flows, positions, ignoreRowLocks := laneColumns(lanes)
	args := []any{
		q.ID, r.Lane.Priority, flows, positions, r.Limit, r.Node, r.ClaimID, r.quantum,
		ignoreRowLocks,
	}
	switch {
	case len(q.limits) == 0:
		return q.sql.claim.lockFirst, args
	case q.weighed() && q.rates == ratePerKey:
		return q.sql.claim.weighedKeyed, append(args, q.limits, q.rates)
	case q.weighed():
		return q.sql.claim.weighed, append(args, q.limits, q.rates)
	case q.rates == ratePerKey:
		return q.sql.claim.lockFirstKeyed, append(args, q.limits, q.rates)
	default:
		return q.sql.claim.lockFirstLimited, append(args, q.limits, q.rates)
	}
}

// weighed reports that claims read the weights of entries: the queue is under limits, and entries may have some.
func (q *Queue) weighed() bool { return q.mayWeigh && len(q.limits) > 0 }

// laneColumns are lanes as arrays.
func laneColumns(lanes []ClaimLane) (flows []string, positions []int64, ignoreRowLocks []bool) {
	for _, l := range lanes {
		flows, positions = append(flows, l.Flow), append(positions, l.From)
		ignoreRowLocks = append(ignoreRowLocks, l.IgnoreRowLocks)
	}
	return flows, positions, ignoreRowLocks
}

// claim claims from lanes in one transaction and returns the state of those that it reached.
func (q *Queue) claim(ctx context.Context, r ClaimRequest, lanes []ClaimLane, form claimForm) ([]Claimed, error) {
	r.quantum = q.quantum()
	claimed, groups, err := q.readClaim(ctx, r, lanes, form)
	if postgres.Code(err) == limitUncounted {
		return []Claimed{{TryLater: true}}, nil
	}
	if unreadable(err) {
		return []Claimed{{TryLater: true}}, q.failUnreadable(ctx, lanes, r.Limit, err)
	}
	if err != nil {
		return nil, q.errorf("claim from", err)
	}
	if len(groups) > 0 {
		failed, err := q.readGroups(ctx, groups), error(nil)
		if failed != nil && !unreadable(failed) {
			return nil, failed
		}
		if failed != nil {
			for _, l := range groups {
				l.Entries = nil // all go back
			}
		}
		if err := q.refundUncovered(ctx, groups); err != nil {
			return nil, err
		}
		groups, err = q.handBackEmpty(ctx, r.Node, groups)
		if err == nil && failed != nil {
			err = q.failUnreadable(ctx, lanes, r.Limit, failed)
		}
		if err != nil {
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
		sortLocks(claimed[i].Locks)
	}
	return claimed, nil
}

// limitUncounted is the SQLSTATE of penstock.charge_lanes: since the claim began, a limit came so near that
// its use must be counted. Nothing was claimed; the next claim counts.
const limitUncounted = postgres.SerializationFailure

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
