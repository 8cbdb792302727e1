package recovery

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Node is the state of a node in one reading.
type Node struct {
	ID     invalidation.NodeID
	Name   string
	Beat   int64         // heartbeats so far
	Silent time.Duration // since the last one, by the database's clock
	Lease  time.Duration
	Tokens []invalidation.Token // of the locks that it listed in its last heartbeat
	// Running are the Tokens under which an entry had begun to run at the last heartbeat.
	Running []invalidation.Token
	// Blamed reports that crashes were counted because of this node. They are taken back if it is
	// heard again.
	Blamed bool
	// Threads is how many locks it can run at once; 0 if unknown.
	Threads int
	// Gateway nodes run no entries: they do not count in the decision to suspend recovery.
	Gateway bool
}

// dead reports whether the node's lease has lapsed.
func (n Node) dead() bool { return n.Silent > n.Lease }

// Heard remembers the last heartbeat of each node, and when it was seen first, by the leader's monotonic clock.
type Heard map[invalidation.NodeID]heardBeat

type heardBeat struct {
	beat int64
	at   time.Time
}

// Overdue is a node that the database's clock takes for alive although it sent no heartbeat for longer than its lease.
type Overdue struct {
	ID      invalidation.NodeID
	Beat    int64
	Unheard time.Duration
}

// Overdue notes the heartbeats of a reading, which was complete at at, and returns the overdue nodes. Their
// heartbeats are from before the database's clock was set back, or lapsed while the answer was on its way:
// Silent is of the moment of the reading.
func (h Heard) Overdue(nodes []Node, at time.Time) []Overdue {
	var overdue []Overdue
	present := make(map[invalidation.NodeID]bool, len(nodes))
	for _, n := range nodes {
		present[n.ID] = true
		last, known := h[n.ID]
		if !known || last.beat != n.Beat {
			h[n.ID] = heardBeat{n.Beat, at}
			continue
		}
		if unheard := at.Sub(last.at); unheard > n.Lease && !n.dead() {
			overdue = append(overdue, Overdue{n.ID, n.Beat, unheard})
		}
	}
	maps.DeleteFunc(h, func(id invalidation.NodeID, _ heardBeat) bool { return !present[id] })
	return overdue
}

// Observation is the locks and nodes as one pass read them. The locks must be read before the
// nodes: a node is registered before it claims, so every node of these locks that was not removed
// is among the nodes.
type Observation struct {
	Locks []invalidation.HeldLock
	Nodes []Node
}

// StuckCause is why a lock is stuck.
type StuckCause string

// The causes for which a lock is stuck.
const (
	NodeDead StuckCause = "node_dead" // the node's lease has lapsed
	NodeGone StuckCause = "node_gone" // the node has no row
	Unlisted StuckCause = "unlisted"  // the node is alive and does not list the lock
)

// Crashed reports whether the node died while it held the lock: entries that it ran count a crash.
func (c StuckCause) Crashed() bool { return c != Unlisted }

// Stuck is a lock that no node will settle.
type Stuck struct {
	invalidation.HeldLock
	Cause StuckCause
	// Waited reports that the node died before a thread began to run the lock, as far as the last heartbeat and the
	// number of threads tell: no crash is counted. Begun.Mark sets it.
	Waited bool
}

// Sightings remember, for each lock that a live node left out, the number of the first heartbeat that counts
// against it.
type Sightings map[invalidation.Token]int64

// Diagnose returns the stuck locks with their causes, oldest claim first, and the sightings for the
// next call. A lock that a live node lists is never among them.
//
// A node runs no entry of a claim whose answer took three quarters of its lease, and lists its
// locks in each heartbeat. So a heartbeat counts as leaving a lock out if the lock was at least
// that old, and the lock is stuck when a later heartbeat leaves it out as well: the first list may
// have been made before the claim's answer, the second was not. The lock must also be older than the whole lease.
func Diagnose(o Observation, before Sightings) ([]Stuck, Sightings) {
	nodes := make(map[invalidation.NodeID]*Node, len(o.Nodes))
	type mention struct {
		node  invalidation.NodeID
		token invalidation.Token
	}
	listed := map[mention]bool{}
	for i := range o.Nodes {
		n := &o.Nodes[i]
		nodes[n.ID] = n
		for _, token := range n.Tokens {
			listed[mention{n.ID, token}] = true
		}
	}
	var stuck []Stuck
	after := Sightings{}
	for _, lock := range o.Locks {
		node, known := nodes[lock.Node]
		switch {
		case !known:
			stuck = append(stuck, Stuck{HeldLock: lock, Cause: NodeGone})
		case node.dead():
			stuck = append(stuck, Stuck{HeldLock: lock, Cause: NodeDead})
		case listed[mention{lock.Node, lock.Token}], lock.Age <= node.Silent:
			// Alive and at work, or claimed after the last heartbeat.
		default:
			first, seen := before[lock.Token]
			if !seen {
				first = node.Beat
			}
			if seen || lock.Age-node.Silent >= invalidation.ActFor(node.Lease) {
				after[lock.Token] = first
			}
			if seen && node.Beat > first && lock.Age > node.Lease {
				stuck = append(stuck, Stuck{HeldLock: lock, Cause: Unlisted})
			}
		}
	}
	slices.SortFunc(stuck, func(a, b Stuck) int { return cmp.Compare(a.Token, b.Token) })
	return stuck, after
}

// Begun remembers, for each node that died, the locks that it can have begun to run.
type Begun map[invalidation.NodeID]map[invalidation.Token]bool

// Mark marks the locks of dead nodes under which no entry can have begun to run as waited: a lock
// that was only claimed did not kill its node. The last heartbeat lists the running tokens. Only if
// they were fewer than the node's threads can others have begun between that heartbeat and the
// death; an entry that kills its node at once is one of those.
//
// A node's row is removed only while it holds no lock: a lock whose node has no row was claimed behind that, by a claim
// whose answer the node did not accept any more.
//
// stuck is in the order of tokens, as Diagnose returns it. The first call with a dead node decides:
// locks that are freed later do not make others count as begun.
func (b Begun) Mark(stuck []Stuck, nodes []Node) {
	known := make(map[invalidation.NodeID]*Node, len(nodes))
	for i := range nodes {
		known[nodes[i].ID] = &nodes[i]
	}
	dead := map[invalidation.NodeID][]*Stuck{}
	for i := range stuck {
		s := &stuck[i]
		s.Waited = s.Cause == NodeGone
		if s.Cause == NodeDead && known[s.Node].Threads > 0 {
			dead[s.Node] = append(dead[s.Node], s)
		}
	}
	for node, locks := range dead {
		if b[node] == nil {
			b[node] = begun(locks, known[node])
		}
		for _, s := range locks {
			s.Waited = !b[node][s.Token]
		}
	}
	maps.DeleteFunc(b, func(id invalidation.NodeID, _ map[invalidation.Token]bool) bool { return dead[id] == nil })
}

// begun returns the locks of a node under which an entry was running or can have begun to run since
// its last heartbeat: those that it listed as running, and one for each thread that was free then,
// in the order in which threads take them. A node with several threads has a spare one, which takes
// only the first lock of a lane, and only while the others are busy.
func begun(locks []*Stuck, n *Node) map[invalidation.Token]bool {
	running := make(map[invalidation.Token]bool, len(n.Running))
	for _, token := range n.Running {
		running[token] = true
	}
	taken, lanes := map[invalidation.Token]bool{}, map[heldLane]bool{}
	var waiting []*Stuck
	for _, s := range locks {
		if running[s.Token] {
			taken[s.Token] = true
			lanes[heldLane{s.QueueID, s.Lane}] = true
		} else {
			waiting = append(waiting, s)
		}
	}
	spare := n.Threads > 1 && len(taken) <= n.Threads
	for _, w := range inOrder(waiting, lanes) {
		switch {
		case len(taken) < n.Threads:
			taken[w.Token] = true
		case spare && w.urgent:
			taken[w.Token] = true
			return taken
		}
	}
	return taken
}

type heldLane struct {
	queue int32
	lane  invalidation.Lane
}

// waitingLock is a lock that its node had not listed as running.
type waitingLock struct {
	*Stuck
	urgent bool // the first one of its lane
}

// inOrder sorts locks nearly as threads take them: claim by claim, and within a claim first the locks that are the
// first of their lane on the node, then the others by position. Threads take a lock of the one kind and one of the
// other in turn, so that after a claim of several lanes a crash may be counted for the wrong lock. lanes are the lanes
// of which the node ran a lock.
func inOrder(locks []*Stuck, lanes map[heldLane]bool) []waitingLock {
	claims := map[int32]int{} // in their order: a claim's first token is smaller than those of later claims
	for _, s := range locks {
		if _, known := claims[s.Claim]; !known {
			claims[s.Claim] = len(claims)
		}
	}
	slices.SortFunc(locks, func(a, b *Stuck) int {
		return cmp.Or(cmp.Compare(claims[a.Claim], claims[b.Claim]), cmp.Compare(a.Position, b.Position))
	})
	order := make([]waitingLock, len(locks))
	for i, s := range locks {
		l := heldLane{s.QueueID, s.Lane}
		order[i] = waitingLock{s, !lanes[l]}
		lanes[l] = true
	}
	slices.SortStableFunc(order, func(a, b waitingLock) int {
		if byClaim := cmp.Compare(claims[a.Claim], claims[b.Claim]); byClaim != 0 || a.urgent == b.urgent {
			return byClaim
		}
		if a.urgent {
			return -1
		}
		return 1
	})
	return order
}
