package tasknode

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// laneTable is what the scheduling threads know about lanes: which may have work, and at which position to begin.
type laneTable struct {
	mu     sync.Mutex
	ranker Ranker
	queues map[int32]*servedQueue
	lanes  map[laneKey]*lane
	awake  []*lane // those that may have work, in no order
	epoch  epoch
	top    int64 // the last position that any poll or claim has met
	wants  wants
	// of the last ranking, kept so that the next one need not make them
	ranked     []*lane
	candidates []*fairness.Candidate
	chosen     []int
}

type laneKey struct {
	queue int32
	lane  invalidation.Lane
}

// servedQueue is a queue that the node serves.
type servedQueue struct {
	id      int32
	name    string
	queue   *invalidation.Queue
	handler invalidation.Handler
	last    *lane     // that was leased last; nil: none was
	heardAt time.Time // when a hint came last
	rest    rest      // of all its lanes, since what they share left no room
}

// rememberMax is how many lanes a table remembers, beside those that have work.
const rememberMax = 20_000

func newLaneTable(ranker Ranker) *laneTable {
	return &laneTable{ranker: ranker, queues: map[int32]*servedQueue{}, lanes: map[laneKey]*lane{}, epoch: epoch{1, 1}}
}

// serve replaces the queues that the node serves, and says whether they are others than before. Queues that were served
// before keep their state: their values in the map are replaced by the known ones.
func (t *laneTable) serve(queues map[int32]*servedQueue) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	changed = len(queues) != len(t.queues)
	for id, s := range queues {
		if old := t.queues[id]; old != nil {
			old.queue, old.handler = s.queue, s.handler
			queues[id] = old
		} else {
			changed = true
		}
	}
	t.queues = queues
	maps.DeleteFunc(t.lanes, func(k laneKey, l *lane) bool {
		gone := queues[k.queue] == nil
		if gone {
			t.sleep(l)
		}
		return gone
	})
	return changed
}

// queue returns the handle on a queue that is served, nil if it is not.
func (t *laneTable) queue(id int32) *invalidation.Queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.queues[id]; s != nil {
		return s.queue
	}
	return nil
}

// served lists the queues from which the node may claim at all.
func (t *laneTable) served() []int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.queues))
}

// hint says that a queue has new entries, in a lane that the hint names; else its lane that was served last is worth
// a try.
func (t *laneTable) hint(queue int32, named *invalidation.Lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.queues[queue]
	if s == nil {
		return
	}
	s.heardAt = time.Now()
	l := s.last
	if named != nil {
		key := laneKey{queue, *named}
		if l = t.lanes[key]; l == nil {
			t.forget()
			l = t.add(key, 0)
			l.moved(t.top + 1) // it comes after all that is known
		}
	}
	if l == nil {
		return
	}
	t.wake(l)
	l.hinted = true
	l.hear()
}

// add makes a lane that is not known, whose claims begin at a position.
func (t *laneTable) add(key laneKey, lowWater int64) *lane {
	l := &lane{key: key, marks: marks{lowWater: lowWater, headAt: time.Now()}}
	l.Lane = key.lane
	t.lanes[key] = l
	return l
}

// found records which lanes of a queue have ready rows.
func (t *laneTable) found(queue int32, heads []invalidation.LaneHead) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.queues[queue]
	if s == nil { // not any more: that changed during the poll
		return
	}
	for _, h := range heads {
		l := t.noteReady(queue, h)
		l.hinted = time.Since(s.heardAt) < time.Second
	}
	t.forget()
}

// forget drops lanes without work where there are very many: flows may come once and never again.
func (t *laneTable) forget() {
	if len(t.lanes) > rememberMax {
		maps.DeleteFunc(t.lanes, func(_ laneKey, l *lane) bool { return l.awake == 0 && l.lease == nil })
	}
}

// readyAgain records the position at which a key that this node held is ready again.
func (t *laneTable) readyAgain(queue int32, head invalidation.LaneHead) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queues[queue] != nil {
		t.noteReady(queue, head).hear()
	}
}

// noteReady notes a ready row of a lane.
func (t *laneTable) noteReady(queue int32, h invalidation.LaneHead) *lane {
	key := laneKey{queue, h.Lane}
	l := t.lanes[key]
	if l == nil {
		l = t.add(key, h.Position)
	}
	l.marks.lower(h.Position) // a row before them came late, or came back
	if v := l.lease; v != nil && (v.arrived == 0 || h.Position < v.arrived) {
		v.arrived = h.Position
	}
	t.wake(l)
	l.moved(h.Position)
	t.top = max(t.top, h.Position)
	return l
}

// wake notes that there may be work.
func (t *laneTable) wake(l *lane) {
	if l.awake == 0 && t.lanes[l.key] == l {
		t.awake = append(t.awake, l)
		l.awake, l.Since = len(t.awake), time.Now()
	}
}

// sleep notes that there is no work.
func (t *laneTable) sleep(l *lane) {
	if l.awake == 0 {
		return
	}
	last := len(t.awake) - 1
	t.awake[l.awake-1], t.awake[last].awake = t.awake[last], l.awake
	t.awake[last], t.awake = nil, t.awake[:last]
	l.awake = 0
	t.wants.remove(l)
}

// open says that the queue of a lane lets it be claimed from: neither the queue nor the flow is paused, and the queue
// is not disabled, nor does it rest.
func (t *laneTable) open(l *lane, now time.Time) bool {
	s := t.queues[l.key.queue]
	if s.rest.lasts(now, t.epoch) || s.queue.Disabled != nil {
		return false
	}
	_, paused := s.queue.Paused(l.Lane.Flow, now)
	return !paused
}

// take picks the lane that the ranker puts first among those with work, and up to most-1 that come next, to be claimed
// along. It returns nil if there is none, or none that should go before one that a thread of this node has leased.
func (t *laneTable) take(affinity Affinity, idle bool, most int, now time.Time) []*laneLease {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.granted(now); l != nil {
		return []*laneLease{t.lease(l, now)}
	}
	t.candidates, t.ranked = t.candidates[:0], t.ranked[:0]
	over := t.passOver(affinity, now)
	for _, l := range t.awake {
		l.Taken = l.lease != nil || l.elsewhere(now)
		if over[l] || (!l.Taken && l.rest.lasts(now, t.epoch)) || !t.open(l, now) {
			continue
		}
		l.Queue = t.queues[l.key.queue].queue
		t.candidates, t.ranked = append(t.candidates, &l.Candidate), append(t.ranked, l)
	}
	t.chosen = t.ranker.Next(t.chosen[:0], t.candidates, most, idle && !t.inTurn(now))
	leases := make([]*laneLease, 0, len(t.chosen))
	for n, i := range t.chosen {
		l := t.ranked[i]
		if n > 0 && (l.large || leases[0].lane.large) {
			break // it would leave nothing to the next; they are for other threads
		}
		leases = append(leases, t.lease(l, now))
	}
	return leases
}

// countAwake is how many lanes may have work.
func (t *laneTable) countAwake() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.awake)
}
