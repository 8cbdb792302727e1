package recovery

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Node is a node as one look finds it.
type Node struct {
	ID     invalidation.NodeID
	Name   string
	Beat   int64         // heartbeats so far
	Silent time.Duration // since the last one, by the database's clock
	Lease  time.Duration
	Tokens []invalidation.Token // what it said it holds
	// Running are those of Tokens under which an entry had begun to run at the last heartbeat.
	Running []invalidation.Token
	// Blamed says that crashes were counted on its account, which are taken back if it lives.
	Blamed bool
	// Threads is how many locks it can have run at once; 0 if it did not say.
	Threads int
}

// dead says that the node's lease has lapsed.
func (n Node) dead() bool { return n.Silent > n.Lease }

// Look is what the database says at one moment. The locks must have been read before the nodes: a node is known
// before it claims, so every node of these locks that was not removed is among the nodes.
type Look struct {
	Locks []invalidation.HeldLock
	Nodes []Node
}

// Cause is why a lock is stuck.
type Cause string

// The causes.
const (
	NodeDead Cause = "node_dead" // the node's lease has lapsed
	NodeGone Cause = "node_gone" // the node has no row
	Unlisted Cause = "unlisted"  // the node is alive and does not know of the lock
)

// Crashed says that the node died with the lock, which counts a crash for what it ran.
func (c Cause) Crashed() bool { return c != Unlisted }

// Stuck is a lock that nobody will settle.
type Stuck struct {
	invalidation.HeldLock
	Cause Cause
}

// Sightings remember, for each lock that a live node left out, the number of the first heartbeat that counts against it.
type Sightings map[invalidation.Token]int64

// Diagnose says which locks are stuck and why, oldest claim first, and what to remember for the next look.
// A lock that a live node lists is never among them.
//
// A node runs nothing under a claim whose answer took three quarters of its lease, and lists what it runs in each heartbeat.
// So a lock counts as left out by a heartbeat that came when the lock was that old, and it is stuck when a later one leaves
// it out as well: the list of the first may have been made before the answer, that of the second was made after the first.
func Diagnose(look Look, before Sightings) ([]Stuck, Sightings) {
	nodes := make(map[invalidation.NodeID]*Node, len(look.Nodes))
	type mention struct {
		node  invalidation.NodeID
		token invalidation.Token
	}
	listed := map[mention]bool{}
	for i := range look.Nodes {
		n := &look.Nodes[i]
		nodes[n.ID] = n
		for _, token := range n.Tokens {
			listed[mention{n.ID, token}] = true
		}
	}
	var stuck []Stuck
	after := Sightings{}
	for _, lock := range look.Locks {
		node, known := nodes[lock.Node]
		switch {
		case !known:
			stuck = append(stuck, Stuck{lock, NodeGone})
		case node.dead():
			stuck = append(stuck, Stuck{lock, NodeDead})
		case listed[mention{lock.Node, lock.Token}], lock.Age <= node.Silent:
			// Alive and at work, or claimed after the last heartbeat.
		default:
			first, seen := before[lock.Token]
			if !seen {
				first = node.Beat
			}
			if seen || lock.Age-node.Silent >= node.Lease*3/4 {
				after[lock.Token] = first
			}
			if seen && node.Beat > first && lock.Age > node.Lease {
				stuck = append(stuck, Stuck{lock, Unlisted})
			}
		}
	}
	slices.SortFunc(stuck, func(a, b Stuck) int { return cmp.Compare(a.Token, b.Token) })
	return stuck, after
}

// Begun remembers, for each node that died, the locks that it can have begun to run.
type Begun map[invalidation.NodeID]map[invalidation.Token]bool

// Mark marks the locks of dead nodes under which nothing can have begun to run as waited: a lock that a node had only
// claimed did not kill it. The last heartbeat says which tokens were running. Only where they were fewer than its threads
// can others have begun between that heartbeat and the death, and an entry that kills its node at once is one of those.
//
// stuck is in the order of tokens, as Diagnose returns it. The first look at a dead node counts: what is freed later
// does not move others up.
func (b Begun) Mark(stuck []Stuck, nodes []Node) {
	known := make(map[invalidation.NodeID]*Node, len(nodes))
	for i := range nodes {
		known[nodes[i].ID] = &nodes[i]
	}
	dead := map[invalidation.NodeID][]*Stuck{}
	for i := range stuck {
		if s := &stuck[i]; s.Cause == NodeDead && known[s.Node].Threads > 0 {
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

// begun returns the locks of a node under which an entry was running or can have begun to run since its last heartbeat: those
// that it called running, and one for each thread that was free then, in the order in which threads take them. Beside several
// threads there is a spare one, which takes the first lock of a lane alone, and only while all others are busy.
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

// waitingLock is a lock that its node had not called running.
type waitingLock struct {
	*Stuck
	urgent bool // the first one of its lane
}

// inOrder sorts locks as threads take them: claim by claim, of each first those that are the first of their lane on the node,
// then the others by position. lanes are those of which the node ran a lock.
func inOrder(locks []*Stuck, lanes map[heldLane]bool) []waitingLock {
	claims := map[int32]int{} // in their order: a claim's first token is smaller than those of later claims
	for _, s := range locks {
		if _, met := claims[s.Claim]; !met {
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
