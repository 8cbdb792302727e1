package fairness

import (
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Ranker ranks the lanes of a task node by a Book. Make it with NewRanker, and run it beside the node so that the book
// is shared with other nodes.
type Ranker struct {
	book  *Book
	share exchange
	lanes []Lane // of the ranking under way; its callers take turns
	order []int

	mu   sync.Mutex
	used bool // lanes were ranked since the last exchange
}

// Candidate is a lane from which a node may claim, as its scheduling threads pass it to the ranker.
type Candidate struct {
	Queue *invalidation.Queue
	Lane  invalidation.Lane
	Head  int64     // position of its first ready row, or of a later one if the node does not know the first yet
	Since time.Time // when it last moved, or began to have work
	Taken bool      // a thread of this node is claiming from it, or another node was a moment ago
	Note  any       // state of the ranker for this lane
	// Owed is set by the ranker: how much service is to be claimed at most, one lock at least, where the lane goes
	// first only since its band is owed its guaranteed share. 0: nothing bounds it.
	Owed float64
}

// note is the ranker's state for a candidate.
type note struct {
	Lane
	queue *invalidation.Queue // as it was when the note was made
}

// Next appends to dst the indexes of the lanes to claim from, none if none is to be claimed from now: while
// the first is claimed from, those behind it wait their turn. If the node is idle they need not, unless they
// are of a lower band or behind it in a fifo queue. With the first come those of its queue and band that
// follow it, most of them in all.
func (r *Ranker) Next(dst []int, candidates []*Candidate, most int, idle bool) []int {
	now, taken := time.Now(), 0
	r.lanes = r.lanes[:0]
	for _, c := range candidates {
		n, known := c.Note.(*note)
		if !known || n.queue != c.Queue {
			n = newNote(c)
			c.Note = n
		}
		n.HeadPos, n.HeadAge, n.Taken = c.Head, now.Sub(c.Since), c.Taken
		c.Owed = 0
		r.lanes = append(r.lanes, n.Lane)
		if c.Taken {
			taken++
		}
	}
	r.order = r.book.Rank(r.order[:0], r.lanes, taken+most, now)
	for i, c := range candidates {
		if n, known := c.Note.(*note); known {
			n.found = r.lanes[i].found
		}
	}
	r.mu.Lock()
	r.used = r.used || len(candidates) > 0
	r.mu.Unlock()
	order := r.from(idle)
	owed := 0.0
	if len(order) > 0 {
		owed = r.book.owed(r.lanes[order[0]].Priority)
	}
	for n, i := range order {
		l, best := &r.lanes[i], &r.lanes[order[0]]
		if n == most || l.Taken || l.Queue != best.Queue || l.Priority != best.Priority {
			break
		}
		candidates[i].Owed = owed
		dst = append(dst, i)
	}
	return dst
}

// from is the order from the first lane on that may be claimed from beside those that are.
func (r *Ranker) from(idle bool) []int {
	var behind []int32 // fifo queues whose first lane is taken: no other may go before it
	for n, i := range r.order {
		l := &r.lanes[i]
		switch {
		case l.Priority != r.lanes[r.order[0]].Priority:
			return nil
		case !l.Taken && !slices.Contains(behind, l.Queue):
			return r.order[n:]
		case !idle:
			return nil
		case l.Algorithm == Fifo:
			behind = append(behind, l.Queue)
		}
	}
	return nil
}

func newNote(c *Candidate) *note {
	n := &note{Lane: laneOf(*c), queue: c.Queue}
	n.QueueWeight, n.Weight = c.Queue.Config.Priority, c.Queue.FlowWeight(c.Lane.Flow)
	if c.Queue.Config.Algorithm == "fifo" {
		n.Algorithm = Fifo
	}
	return n
}

func laneOf(c Candidate) Lane {
	return Lane{Queue: c.Queue.ID, Priority: c.Lane.Priority, Flow: c.Lane.Flow}
}

// Charge books the estimated cost of a claim.
func (r *Ranker) Charge(c Candidate, estimate float64) {
	r.book.Charge(laneOf(c), estimate, time.Now())
}

// Extend books the cost of a run beyond its estimate so far.
func (r *Ranker) Extend(c Candidate, more float64) {
	r.book.Extend(laneOf(c), more, time.Now())
}

// Correct replaces the estimate booked for a lock by its actual cost.
func (r *Ranker) Correct(c Candidate, charged, actual float64) {
	r.book.Correct(laneOf(c), charged, actual, time.Now())
}
