package tasknode

import (
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// takeOne leases the lane that comes first.
func takeOne(table *laneTable, affinity Affinity, idle bool, now time.Time) *laneLease {
	for _, v := range table.take(affinity, idle, 1, now) {
		return v
	}
	return nil
}

// exactly and lasting are jitters for tests: none, and one that makes every rest as long.
func exactly(d time.Duration) time.Duration { return d }

func lasting(d time.Duration) func(time.Duration) time.Duration {
	return func(time.Duration) time.Duration { return d }
}

// drained is the end of a claim that found its lane empty.
var drained = claimEnd{answer: invalidation.Claimed{Drained: true}}

// What comes free between the question for a permit and the note that there was none must not be slept through.
func TestWhatComesFreeDuringALeaseIsNotMissed(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	now := time.Now()
	lease := takeOne(table, nil, true, now)
	table.nextEpoch()
	table.endRefused(lease, refusedByGate, now, lasting(time.Hour))
	if lease = takeOne(table, nil, true, now); lease == nil {
		t.Fatal("the lane rests although something came free")
	}
	table.endRefused(lease, refusedByGate, now, lasting(time.Hour))
	if takeOne(table, nil, true, now) != nil {
		t.Error("the lane is tried again although nothing came free")
	}
}

// The node woke once more for a lane that could be claimed from already.
func TestARefusalThatIsOverIsNotWaitedFor(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	now := time.Now()
	table.endRefused(takeOne(table, nil, true, now), refusedByGate, now, lasting(time.Minute))
	if rest := table.rested(now); rest != time.Minute {
		t.Errorf("the node rests for %v, want as long as the lane does", rest)
	}
	table.nextEpoch()
	if rest := table.rested(now); rest != time.Hour {
		t.Errorf("the node rests for %v, want an hour: no lane rests", rest)
	}
}

// A lane whose claim failed after another claimer had been in it counted as leased by another node for as long as it
// rested.
func TestAClaimThatFailedIsNoContention(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	now := time.Now()
	lease := takeOne(table, nil, true, now)
	table.end(lease, claimEnd{answer: invalidation.Claimed{TryLater: true}}, now, exactly)
	if !lease.lane.elsewhere(now) {
		t.Error("no other claimer is known in a lane that was contended")
	}
	now = now.Add(time.Second)
	lease = takeOne(table, nil, true, now)
	table.end(lease, claimEnd{err: errors.New("away")}, now, exactly)
	if lease.lane.elsewhere(now) {
		t.Error("another claimer is known in a lane whose claim failed")
	}
}

// A lane of a queue that was paused after a refusal is not tried again. As long as the pause lasted, no lane was claimed
// from beside one that ranks before it.
func TestALaneThatIsNotRefusedAgainKeepsNoOthersInTurn(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	now := time.Now()
	table.endRefused(takeOne(table, nil, true, now), refusedByLimit, now, exactly)
	if !table.inTurn(now.Add(wantedFor)) {
		t.Error("others are not in turn although a lane was refused")
	}
	if table.inTurn(now.Add(2 * wantedFor)) {
		t.Error("others are in turn for a lane that was not refused again")
	}
}

// What all lanes of a queue share is asked for once, not by each lane; other queues go on.
func TestLanesOfAQueueThatIsRefusedRestTogether(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}, 2: {name: "other", queue: &invalidation.Queue{ID: 2}}})
	heads := []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1, Flow: "a"}, Position: 1}, {Lane: invalidation.Lane{Priority: 1, Flow: "b"}, Position: 2}}
	table.found(1, heads)
	now := time.Now()
	refused := takeOne(table, nil, true, now)
	table.found(2, heads[:1])
	table.endRefused(refused, refusedByLimit, now, lasting(time.Hour))
	table.hint(1, &invalidation.Lane{Priority: 1, Flow: "c"})
	lease := takeOne(table, nil, true, now)
	if lease == nil || lease.served.name != "other" {
		t.Fatalf("took %+v, want the lane of the other queue", lease)
	}
	table.end(lease, drained, now, exactly)
	if lease = takeOne(table, nil, true, now); lease != nil {
		t.Fatalf("took %v although its queue rests", lease.lane.key)
	}
	if rest := table.rested(now); rest < 59*time.Minute {
		t.Errorf("the node rests for %v, want as long as the queue does", rest)
	}
	table.nextEpoch() // a lock ended: it may be the one that was in the way
	if leases := table.take(nil, true, 10, now); len(leases) != 3 {
		t.Errorf("took %d lanes when something came free, want all three", len(leases))
	}
}

// A hint may be about an entry that was committed after the claim took its snapshot.
func TestAHintDuringAClaimIsNotMissed(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	lane := invalidation.Lane{Priority: 1, Flow: "a"}
	table.hint(1, &lane)
	emptied := claimEnd{answer: invalidation.Claimed{Scanned: 1, Drained: true}}
	now := time.Now()

	lease := takeOne(table, nil, true, now)
	table.hint(1, &lane)
	table.end(lease, emptied, now, exactly)
	if lease = takeOne(table, nil, true, now); lease == nil {
		t.Fatal("the lane is left alone although a hint came during the claim")
	}
	table.end(lease, emptied, now, exactly)
	if takeOne(table, nil, true, now) != nil {
		t.Error("the lane is tried again although it was emptied and no hint came")
	}
}

func TestALaneThatWasFoundWithoutAHintIsClaimedFromUntilItIsSeenEmpty(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	now := time.Now()
	for _, c := range []invalidation.Claimed{{Scanned: few, Drained: true}, {Drained: true}} {
		lease := takeOne(table, nil, true, now)
		if lease == nil {
			t.Fatal("the lane is left alone before a claim found nothing in it")
		}
		table.end(lease, claimEnd{answer: c}, now, exactly)
	}
	if takeOne(table, nil, true, now) != nil {
		t.Error("the lane is tried again although nothing was in it")
	}
}

// A poll may be under way while a queue is dropped, or moves to another application.
func TestAQueueThatLeftDuringAPollIsForgotten(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.serve(map[int32]*servedQueue{})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	if takeOne(table, nil, true, time.Now()) != nil {
		t.Error("a queue is claimed from that the node does not serve")
	}
}

// One lock more than there are permits is let in for a lane of which the node holds nothing, if threads come free soon.
func TestLaneOfWhichTheNodeHoldsNothingIsLetInBetweenShortRuns(t *testing.T) {
	table := newLaneTable(&turns{})
	short, long := &servedQueue{id: 1, queue: &invalidation.Queue{ID: 1}}, &servedQueue{id: 2, queue: &invalidation.Queue{ID: 2}}
	table.serve(map[int32]*servedQueue{1: short, 2: long})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 1}})
	v := takeOne(table, nil, true, time.Now())
	f := newHoldings()
	f.queues[1] = &holding{held: 4 + 500, run: 10 * time.Millisecond}
	if !f.fits(v, 500, 4) {
		t.Error("it waits for a permit beside runs of 10 ms on 4 threads")
	}
	f.queues[2] = &holding{held: 4, run: time.Second}
	if f.fits(v, 500, 4) {
		t.Error("it is let in beside runs of a second on 4 threads: another node may be free sooner")
	}
	f.queues[2].run = 0
	if f.fits(v, 500, 4) {
		t.Error("it is let in beside runs of which nobody knows how long they are")
	}
	f.noteRun(long, time.Millisecond)
	if !f.fits(v, 500, 4) {
		t.Error("it waits for a permit beside runs of a millisecond that all fail")
	}
	f.queues[2].run = time.Second
	if f.fits(v, 500, 4) {
		t.Error("it is let in beside runs of a second of which some fail at once")
	}
	f.queues[2].held = 0
	if f.hold(v.lane.key, 1); f.fits(v, 500, 4) {
		t.Error("a second lock of the lane is let in")
	}
}

// While some of its locks run, a queue may move to another application and back.
func TestLocksOfAQueueThatCameBackAreCountedWhereTheyWere(t *testing.T) {
	n := New(Config{Threads: 4}, nil, nil)
	q := &invalidation.Queue{ID: 1}
	before, now := &servedQueue{id: 1, queue: q}, &servedQueue{id: 1, queue: q}
	var p pile
	p.queue = q
	for i, s := range []*servedQueue{before, before, now} {
		n.holdings.reserve(s, 0, 1)
		n.permits.take(1, 0)
		n.holdings.hold(laneKey{queue: 1}, 1)
		lock := &invalidation.Lock{Token: invalidation.Token(i)}
		p.jobs = append(p.jobs, &job{
			servedLane: servedLane{queue: q, served: s, lane: &lane{key: laneKey{queue: 1}}}, lock: lock,
			reserved: reservation{node: n, queue: s, locks: 1},
		})
		p.endings = append(p.endings, last(invalidation.Done(lock, 1, nil, 0)))
	}
	if n.holdings.reserve(now, 3, 1) != 0 {
		t.Error("more locks than the queue's limit on this node, as those from before it went away do not count")
	}
	n.forget(p)
	if n.holdings.queues[1].held != 0 || n.permits.held() != 0 || len(n.holdings.lanes) != 0 {
		t.Errorf("%+v, %d permits and lanes %v are held, want none: the queue's limit on this node would shift for ever",
			n.holdings.queues[1], n.permits.held(), n.holdings.lanes)
	}
}

// A position is taken before the commit: of two pushes at once the second may be claimed before the first is seen.
func TestAClaimScansAgainThePositionsJustBeforeItsLowWaterMark(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	lane := invalidation.Lane{Priority: 1}
	table.found(1, []invalidation.LaneHead{{Lane: lane, Position: 10_500}})
	now := time.Now()
	lease := takeOne(table, nil, false, now)
	c := invalidation.Claimed{Scanned: 1, LowWater: 10_600, Drained: true, Locks: []*invalidation.Lock{{}}}
	table.end(lease, claimEnd{answer: c}, now, exactly)
	table.hint(1, &lane)
	if lease = takeOne(table, nil, false, now); lease.fromHead || lease.from > 10_599 || lease.from < 10_600-claimOverlap {
		t.Errorf("the next claim begins at %d, want a little before 10600", lease.from)
	}
	c = invalidation.Claimed{Scanned: 1, LowWater: 10_590, Skipped: 1}
	table.end(lease, claimEnd{answer: c, swept: 1}, now, exactly)
	if lease = takeOne(table, nil, false, now); lease.from != 10_591 {
		t.Errorf("after a row that somebody holds the next claim begins at %d, want 10591", lease.from)
	}
}

// A key may come back into line while a thread claims from its lane: before the low-water mark, or behind it and
// before the rows that the claim scans without it.
func TestARowThatCameBackDuringAClaimIsNotMissed(t *testing.T) {
	for name, c := range map[string]struct {
		mark, row int64
		claimed   invalidation.Claimed
	}{
		"before the mark": {50, 7, invalidation.Claimed{Scanned: 1, LowWater: 50, Locks: []*invalidation.Lock{{}}}},
		"behind the mark, and the claim met locked keys alone": {7, 7, invalidation.Claimed{Scanned: 1, Skipped: 1, LowWater: 50}},
		"behind the mark, and the claim brought locks":         {7, 9, invalidation.Claimed{Scanned: 1, LowWater: 5000, Locks: []*invalidation.Lock{{}}}},
		"nothing was there": {50, 7, invalidation.Claimed{}},
	} {
		t.Run(name, func(t *testing.T) {
			table := newLaneTable(&turns{})
			table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
			lane := invalidation.Lane{Priority: 1}
			table.found(1, []invalidation.LaneHead{{Lane: lane, Position: c.mark}})
			now := time.Now()
			v := takeOne(table, nil, true, now)
			table.readyAgain(1, invalidation.LaneHead{Lane: lane, Position: c.row})
			c.claimed.Drained = true
			table.end(v, claimEnd{answer: c.claimed, swept: c.claimed.Skipped, took: time.Millisecond}, now, exactly)
			if v = takeOne(table, nil, true, now); v == nil || v.from > c.row {
				t.Errorf("the next claim is %+v, want one that begins at %d", v, c.row)
			}
		})
	}
}

// A claim may meet a ready row whose key's lock ends just then: nothing sweeps it, and nobody else comes by.
func TestALaneIsGoneBackToForARowThatWasLeftInIt(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 7}})
	now := time.Now()
	claim := func(c invalidation.Claimed) time.Duration {
		v := takeOne(table, nil, true, now)
		if v == nil {
			t.Fatal("nobody comes back for the row")
		}
		table.end(v, claimEnd{answer: c, took: time.Millisecond}, now, exactly)
		pause := max(0, v.lane.rest.until.Sub(now))
		now = now.Add(pause)
		return pause
	}
	left, none := invalidation.Claimed{Scanned: 1, Skipped: 1, LowWater: 7}, invalidation.Claimed{Drained: true}
	for _, want := range []time.Duration{2, 4, 8} {
		claim(left)
		if pause := claim(none); pause != want*time.Millisecond {
			t.Errorf("the lane rests for %s, want %d ms", pause, want)
		}
	}
	if v := takeOne(table, nil, true, now); v == nil || v.from > 7 {
		t.Errorf("the next claim is %+v, want one that begins at 7", v)
	}
}

// Flows may be named once and never again, each by a hint.
func TestLanesThatOnlyHintsNamedAreForgotten(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	for i := range 2 * rememberMax {
		lane := invalidation.Lane{Priority: 1, Flow: strconv.Itoa(i)}
		table.hint(1, &lane)
		table.sleep(table.lanes[laneKey{1, lane}]) // claimed and emptied
	}
	if n := len(table.lanes); n > rememberMax+1 {
		t.Errorf("the table remembers %d lanes without work", n)
	}
}

// Lanes with little go together; one that does not run dry goes alone, and leaves others to other threads.
func TestLanesGoTogetherThatLeaveSomethingToEachOther(t *testing.T) {
	ranker := &turns{queues: map[int32]uint64{2: 1}}
	table := newLaneTable(ranker)
	table.serve(map[int32]*servedQueue{1: {queue: &invalidation.Queue{ID: 1}}, 2: {queue: &invalidation.Queue{ID: 2}}})
	lane := func(queue int32, priority int16, flow string) {
		table.found(queue, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: priority, Flow: flow}, Position: 1}})
	}
	lane(1, 1, "a")
	lane(1, 1, "b")
	lane(1, 1, "c")
	lane(1, 0, "low")
	lane(2, 1, "other")
	now := time.Now()
	take := func(most int) (flows []string, leases []*laneLease) {
		leases = table.take(nil, true, most, now)
		for _, v := range leases {
			flows = append(flows, v.lane.Lane.Flow)
		}
		return flows, leases
	}
	wants := func(want ...string) {
		t.Helper()
		ranker.queues = map[int32]uint64{2: 1}
		flows, leases := take(10)
		if !slices.Equal(flows, want) {
			t.Errorf("claimed together: %q, want %q", flows, want)
		}
		for _, v := range leases {
			table.endUnclaimed(v)
		}
	}
	wants("a", "b", "c") // a has had a turn then
	wants("b", "c", "a")
	flows, leases := take(2)
	if !slices.Equal(flows, []string{"other"}) {
		t.Errorf("then %q, want the other queue", flows)
	}
	table.end(leases[0], drained, now, exactly)
	c := &laneLease{servedLane: servedLane{served: table.queues[1], lane: table.lanes[laneKey{1, invalidation.Lane{Priority: 1, Flow: "c"}}]}}
	table.end(c, claimEnd{answer: invalidation.Claimed{Scanned: 5, LowWater: 5, Locks: make([]*invalidation.Lock, 5)}}, now, exactly)
	wants("c")
	wants("a", "b")
	wants("b") // c would be next, and is for another thread
}
