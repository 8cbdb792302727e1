package invalidation

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// ClaimRequest names the lane of a claim and bounds its locks. Its fields are those of LanesRequest and ClaimLane.
type ClaimRequest struct {
	Node           NodeID
	ClaimID        int32
	Lane           Lane
	From           int64
	Limit          int
	IgnoreRowLocks bool
}

// LanesRequest names the lanes of a claim and bounds its locks.
type LanesRequest struct {
	Node    NodeID
	ClaimID int32       // a number that the node never used before in this incarnation
	Limit   int         // locks of all lanes together
	Lanes   []ClaimLane // at least one; those from the first one of another priority on are left out

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

// Claimed is the answer to a claim: the locks of one lane, and the state of the lane.
type Claimed struct {
	Locks []*Lock
	// TryLater reports that the claim took nothing and does not know what the lane has: another claimer was in the
	// lane, or holds a limit of the queue exclusively; the limits are not those of this handle; a limit must be
	// counted, which the next claim does; or entries could not be read, and are failures now. Try another lane first.
	TryLater bool
	// Limited reports that the limits of the queue leave no headroom in the lane, or that the queue or the
	// flow is throttled (see ThrottleQueue). Wait is how long a token bucket needs (penstock.bucket_wait) or the
	// throttling lasts; 0 if a lock must end first.
	Limited bool
	Wait    time.Duration
	// QueueWide, of Limited: the limit is shared by all lanes of the queue, so that no other lane is worth a claim.
	QueueWide bool
	// Refunded reports that the claim gave units back to token buckets, of entries that it counted and did not get. A
	// claim that was refused for a rate just before may find units now.
	Refunded bool
	// Requeued is where keys are ready again that the claim locked, and of which it found no entry that it may run. No
	// hint tells of them.
	Requeued []LaneHead
	// LowWater is the position from which the next claim of the lane may begin, which saves it a walk over
	// dead rows. A row may come in behind it: begin at 0 about once a second. It is less than ClaimLane.From where the
	// claim met keys and left them to the next one, which is to begin there again.
	LowWater int64
	Scanned  int // ready rows
	Skipped  int // ready rows that could not be claimed, since their keys are locked: Sweep deletes them
	// DelayedFor is how long the ready rows of the lane are delayed, where all of them are; 0 if none is. See
	// NoCapacity.
	DelayedFor time.Duration
	// Drained reports that there was no ready row behind the scanned ones, and that all of them were claimed.
	Drained bool
}

// Claim is ClaimLanes for one lane.
func (q *Queue) Claim(ctx context.Context, r ClaimRequest) (Claimed, error) {
	claimed, err := q.ClaimLanes(ctx, LanesRequest{
		Node: r.Node, ClaimID: r.ClaimID, Limit: r.Limit, Lanes: []ClaimLane{{r.Lane, r.From, r.IgnoreRowLocks}},
	})
	if err != nil {
		return Claimed{}, err
	}
	return claimed[0], nil
}

// ClaimLanes is the claim of nodes: it locks up to r.Limit groups and solo entries of the lanes for a node, and returns
// their entries. Several lanes are claimed from in one transaction; where they can only be claimed from one by one, it
// claims from the first. The rest of the limit that one lane leaves goes to the next. It returns the state of the lanes
// that it reached, at least one, in their order. Each lane that it reaches counts as a lock or more of the limit.
// The caller may start the entries: the claim is committed when ClaimLanes returns. After an error it may have been
// committed nevertheless; Reclaim finds out.
func (q *Queue) ClaimLanes(ctx context.Context, r LanesRequest) ([]Claimed, error) {
	r.Lanes = samePriority(r.Lanes)
	if q.weighed() {
		r.Lanes = r.Lanes[:1]
	}
	claimed, err := q.claimLanes(ctx, r)
	if err == nil && len(claimed) == 0 && len(r.Lanes) > 1 {
		r.Lanes = r.Lanes[:1]
		claimed, err = q.claimLanes(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	if len(claimed) == 0 {
		claimed = []Claimed{{TryLater: true}}
	}
	return claimed, nil
}

// samePriority is the lanes before the first one whose priority is not that of the first.
func samePriority(lanes []ClaimLane) []ClaimLane {
	other := slices.IndexFunc(lanes, func(l ClaimLane) bool { return l.Priority != lanes[0].Priority })
	if other < 0 {
		return lanes
	}
	return lanes[:other]
}

// claimLanes claims by the statement that deletes first, and by the one that locks first where that one cannot. It
// returns nothing where several lanes can only be claimed from one by one.
func (q *Queue) claimLanes(ctx context.Context, r LanesRequest) ([]Claimed, error) {
	if q.locksFirst(r.Lanes) {
		return q.claim(ctx, r, q.lockFirst)
	}
	claimed, err := q.claimDeleting(ctx, r)
	if wouldWait(err) {
		q.policy.lockFirst(r.Lanes)
		return q.claim(ctx, r, q.lockFirst)
	}
	if err != nil {
		return nil, err
	}
	return q.claimKeys(ctx, r, claimed)
}

// locksFirst reports that a claim is to use the statement that locks first.
func (q *Queue) locksFirst(lanes []ClaimLane) bool {
	return q.weighed() || q.policy.locksFirst(lanes) || len(lanes) > 1 && q.rates != rateNone
}

// claimDeleting claims by a statement that deletes first: for one lane without limits by the shortest, which reports
// nothing where it can claim nothing.
func (q *Queue) claimDeleting(ctx context.Context, r LanesRequest) ([]Claimed, error) {
	if len(r.Lanes) == 1 && len(q.limits) == 0 {
		claimed, err := q.claim(ctx, r, q.oneLane)
		if err != nil || len(claimed) > 0 {
			return claimed, err
		}
	}
	return q.claim(ctx, r, q.deleteFirst)
}

// claimKeys follows a claim that deleted first, whose locks stay. Where it met keys, the next claims of their lanes
// lock first. From one lane the rest is claimed now; from several by the next claim, which begins where this one began.
func (q *Queue) claimKeys(ctx context.Context, r LanesRequest, claimed []Claimed) ([]Claimed, error) {
	for i := range claimed {
		c := &claimed[i]
		if c.Skipped == 0 {
			continue
		}
		q.policy.lockFirst(r.Lanes)
		if len(r.Lanes) == 1 {
			return q.claimRest(ctx, r, *c)
		}
		q.policy.lockFirst(r.Lanes[i : i+1])
		c.Skipped, c.LowWater = 0, r.Lanes[i].From-1
	}
	return claimed, nil
}

// claimRest claims what the first claim of a lane left of the limit, by the statement that locks first.
func (q *Queue) claimRest(ctx context.Context, r LanesRequest, first Claimed) ([]Claimed, error) {
	r.Limit -= len(first.Locks)
	if r.Limit == 0 {
		return []Claimed{first}, nil
	}
	claimed, err := q.claim(ctx, r, q.lockFirst)
	if err != nil {
		// The first part is committed: Reclaim finds it with the rest, under the one claim id.
		return nil, err
	}
	if len(claimed) == 0 {
		claimed = []Claimed{{TryLater: true}}
	}
	rest := &claimed[0]
	rest.Locks = append(first.Locks, rest.Locks...)
	sortLocks(rest.Locks)
	return claimed, nil
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

func (p *lanePolicy) locksFirst(lanes []ClaimLane) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	return len(lanes) > 1 && now.Before(p.together) ||
		slices.ContainsFunc(lanes, func(l ClaimLane) bool { return now.Before(p.until[l.Lane]) })
}

// lockFirst has the next claims of a lane lock first, or, where there are several, those of several lanes: a claim does
// not say which of its lanes it would have waited in.
func (p *lanePolicy) lockFirst(lanes []ClaimLane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	until := time.Now().Add(lockFirstFor)
	if len(lanes) > 1 {
		p.together = until
		return
	}
	if p.until == nil || len(p.until) > 10_000 {
		p.until = map[Lane]time.Time{}
	}
	p.until[lanes[0].Lane] = until
}

// rateKind is the strongest kind of token bucket among the limits of a queue; penstock.queue_rate_kind returns it.
type rateKind int

const (
	rateNone   rateKind = iota // no limit has a rate
	rateShared                 // a rate for all entries or for each flow
	ratePerKey                 // a rate for each lock key
)

// claimForm returns one of the statements of a claim and its arguments.
type claimForm func(r LanesRequest) (sql string, args []any)

func (q *Queue) oneLane(r LanesRequest) (string, []any) {
	return q.sql.claim.oneLane, []any{
		q.ID, r.priority(), r.Lanes[0].Flow, r.Lanes[0].From, r.Limit, r.Node, r.ClaimID,
	}
}

func (q *Queue) deleteFirst(r LanesRequest) (string, []any) {
	flows, positions, _ := r.columns()
	args := []any{q.ID, r.priority(), flows, positions, r.Limit, r.Node, r.ClaimID}
	if len(q.limits) == 0 {
		return q.sql.claim.deleteFirst, args
	}
	return q.sql.claim.deleteFirstLimited, append(args, q.limits, q.rates)
}

func (q *Queue) lockFirst(r LanesRequest) (string, []any) {
	flows, positions, ignoreRowLocks := r.columns()
	args := []any{
		q.ID, r.priority(), flows, positions, r.Limit, r.Node, r.ClaimID, r.quantum,
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

// priority is that of all lanes.
func (r *LanesRequest) priority() int16 { return r.Lanes[0].Priority }

// columns are the lanes as arrays.
func (r *LanesRequest) columns() (flows []string, positions []int64, ignoreRowLocks []bool) {
	for _, l := range r.Lanes {
		flows, positions = append(flows, l.Flow), append(positions, l.From)
		ignoreRowLocks = append(ignoreRowLocks, l.IgnoreRowLocks)
	}
	return flows, positions, ignoreRowLocks
}

// claim claims by one statement and returns the state of the lanes that it reached.
func (q *Queue) claim(ctx context.Context, r LanesRequest, form claimForm) ([]Claimed, error) {
	r.quantum = q.quantum()
	claimed, groups, err := q.readClaim(ctx, r, form)
	if postgres.Code(err) == limitUncounted {
		return []Claimed{{TryLater: true}}, nil
	}
	if unreadable(err) {
		return []Claimed{{TryLater: true}}, q.failUnreadable(ctx, r.Lanes, r.Limit, err)
	}
	if err != nil {
		return nil, q.errorf("claim from", err)
	}
	if len(groups) > 0 {
		if err := q.addGroups(ctx, r, groups, claimed); err != nil {
			return nil, err
		}
	}
	for i := range claimed {
		sortLocks(claimed[i].Locks)
	}
	return claimed, nil
}

// addGroups reads the entries of the groups that a claim has locked, and adds the locks to the answers about their
// lanes. Where entries cannot be read, all of these locks end, and the entries that are the reason fail.
func (q *Queue) addGroups(ctx context.Context, r LanesRequest, groups []*Lock, claimed []Claimed) error {
	covered, err := q.cover(ctx, r.Node, groups)
	if err == nil && covered.unreadable != nil {
		err = q.failUnreadable(ctx, r.Lanes, r.Limit, covered.unreadable)
	}
	if err != nil {
		return err
	}
	lanes := make(map[Lane]*Claimed, len(claimed))
	for i := range claimed {
		lanes[r.Lanes[i].Lane] = &claimed[i]
	}
	for _, l := range groups {
		c := lanes[l.Lane]
		c.Refunded = c.Refunded || q.rates != rateNone && l.uncovered()
		if l.Requeued != nil {
			c.Requeued = append(c.Requeued, *l.Requeued)
		}
	}
	for _, l := range covered.locks {
		lanes[l.Lane].Locks = append(lanes[l.Lane].Locks, l)
	}
	return nil
}

// limitUncounted is the SQLSTATE of penstock.charge_lanes: since the claim began, a limit came so near that
// its use must be counted. Nothing was claimed; the next claim counts.
const limitUncounted = postgres.SerializationFailure
