package tasknode

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A node that starts owes a lower band nothing yet, and does not know how long its runs take. The band has its first turn,
// of one lock: all threads would be its for the time of a run.
func TestALowBandTakesNoMoreThanItIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const threads = 16
		n := New(Config{Threads: threads}, nil, nil)
		high, low := &servedQueue{id: 1, queue: &invalidation.Queue{ID: 1}}, &servedQueue{id: 2, queue: &invalidation.Queue{ID: 2}}
		n.lanes.serve(map[int32]*servedQueue{1: high, 2: low})
		n.lanes.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 9}, Position: 1}})
		n.lanes.found(2, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 0}, Position: 2}})
		locks, token := map[int16]int{}, invalidation.Token(0)
		var claims []string
		for n.permits.held() < threads {
			l := takeOne(n.lanes, nil, true, time.Now())
			reserved, refused := n.reserve(l)
			if refused != refusedNot {
				t.Fatalf("a claim is refused (%d) after %v", refused, claims)
			}
			priority := l.lane.key.lane.Priority
			claims = append(claims, fmt.Sprintf("%d of priority %d", reserved.locks, priority))
			locks[priority] += reserved.locks
			var brought []*invalidation.Lock
			for range reserved.locks {
				token++
				brought = append(brought, &invalidation.Lock{
					Key: fmt.Sprint(token), Token: token, ClaimedAt: time.Now(), Entries: make([]invalidation.Entry, 1),
				})
			}
			answer := &claimAnswer{node: n, reserved: reserved, start: time.Now()}
			answer.accept(l, brought)
			n.lanes.end(l, claimEnd{answer: invalidation.Claimed{Scanned: len(brought), Locks: brought}}, time.Now(), exactly)
		}
		if locks[0] != 1 || locks[9] != threads-1 {
			t.Errorf("claims brought %v, want one lock of priority 0 and the rest of priority 9", claims)
		}
	})
}

// A turn of a band that gets its share is of several locks, as many as are its share of those that run.
func TestATurnOfALowBandIsItsShareOfWhatRuns(t *testing.T) {
	n := New(Config{}, nil, nil)
	s := &servedQueue{queue: &invalidation.Queue{}}
	l := &laneLease{servedLane: servedLane{served: s}}
	n.holdings.noteDone(s, time.Minute, 60, 30, true)
	for owed, want := range map[float64]int{0: claimMax, 1e-300: 1, 29: 1, 100: 3, 1e9: claimMax} {
		l.ranked.Owed = owed
		if got := n.claimLimit(l); got != want {
			t.Errorf("a band that is owed %v may claim %d locks that cost 30, want %d", owed, got, want)
		}
	}
}

// While no run of a queue was done, its runs count as those that the node has at hand, and a second at least.
func TestRunsOfANewQueueAreNotExpectedToBeFree(t *testing.T) {
	h := newHoldings()
	fresh, short, long := &servedQueue{id: 1}, &servedQueue{id: 2}, &servedQueue{id: 3}
	expects := func(what string, want float64) {
		t.Helper()
		if use, cost := h.expected(fresh); use != want || cost != want {
			t.Errorf("%s: a run is expected to use %v s and to cost %v, want %v", what, use, cost, want)
		}
	}
	expects("nothing has run", 1)
	h.noteDone(short, time.Millisecond, 0.001, 0.001, true)
	h.reserve(short, 0, 1)
	expects("a short run is at hand", 1)
	h.noteDone(long, time.Minute, 60, 60, true)
	h.reserve(long, 0, 3)
	expects("long runs are at hand", (3*60+0.001)/4)
	h.noteDone(fresh, 2*time.Second, 2, 2, true)
	expects("a run was done", 2)
}
