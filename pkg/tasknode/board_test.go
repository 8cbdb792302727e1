package tasknode

import (
	"strconv"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// What comes free between the question for a permit and the note that there was none must not be slept through.
func TestWhatComesFreeDuringAVisitIsNotMissed(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 1}})
	now := time.Now()
	visit := b.take(&turns{}, nil, true, now)
	b.free()
	b.refuse(visit, now.Add(time.Hour))
	if visit = b.take(&turns{}, nil, true, now); visit == nil {
		t.Fatal("the lane rests although something came free")
	}
	b.refuse(visit, now.Add(time.Hour))
	if b.take(&turns{}, nil, true, now) != nil {
		t.Error("the lane is tried again although nothing came free")
	}
}

// A hint may be about an entry that was committed after the claim took its snapshot.
func TestAHintDuringAClaimIsNotMissed(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	lane := invalidation.Lane{Priority: 1, Flow: "a"}
	b.hint(1, &lane)
	emptied := invalidation.Claimed{Seen: 1, Emptied: true}
	now := time.Now()

	visit := b.take(&turns{}, nil, true, now)
	b.hint(1, &lane)
	b.leave(visit, b.more(visit, emptied), time.Time{})
	if visit = b.take(&turns{}, nil, true, now); visit == nil {
		t.Fatal("the lane is left alone although a hint came during the claim")
	}
	b.leave(visit, b.more(visit, emptied), time.Time{})
	if b.take(&turns{}, nil, true, now) != nil {
		t.Error("the lane is tried again although it was emptied and no hint came")
	}
}

func TestALaneThatWasFoundWithoutAHintIsClaimedFromUntilItIsSeenEmpty(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 1}})
	now := time.Now()
	for _, c := range []invalidation.Claimed{{Seen: 1, Emptied: true}, {Emptied: true}} {
		visit := b.take(&turns{}, nil, true, now)
		if visit == nil {
			t.Fatal("the lane is left alone before a claim found nothing in it")
		}
		b.leave(visit, b.more(visit, c), time.Time{})
	}
	if b.take(&turns{}, nil, true, now) != nil {
		t.Error("the lane is tried again although nothing was in it")
	}
}

// A look may be under way while a queue is dropped, or moves to another application.
func TestAQueueThatLeftDuringALookIsForgotten(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	b.serve(map[int32]*service{})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 1}})
	if b.take(&turns{}, nil, true, time.Now()) != nil {
		t.Error("a queue is claimed from that the node does not serve")
	}
}

// One lock more than there are permits is let in for a lane of which the node holds nothing, if threads come free soon.
func TestLaneOfWhichTheNodeHoldsNothingIsLetInBetweenShortRuns(t *testing.T) {
	b := newBoard()
	short, long := &service{queue: &invalidation.Queue{ID: 1}}, &service{queue: &invalidation.Queue{ID: 2}}
	b.serve(map[int32]*service{1: short, 2: long})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 1}})
	v := b.take(&turns{}, nil, true, time.Now())
	short.held, short.run = 4+500, 10*time.Millisecond
	if !b.fits(v, 500, 4) {
		t.Error("it waits for a permit beside runs of 10 ms on 4 threads")
	}
	long.held, long.run = 4, time.Second
	if b.fits(v, 500, 4) {
		t.Error("it is let in beside runs of a second on 4 threads: another node may be free sooner")
	}
	long.run = 0
	if b.fits(v, 500, 4) {
		t.Error("it is let in beside runs of which nobody knows how long they are")
	}
	long.held = 0
	if b.hold(v.lane, 1); b.fits(v, 500, 4) {
		t.Error("a second lock of the lane is let in")
	}
}

// While some of its locks run, a queue may move to another application and back.
func TestLocksOfAQueueThatCameBackAreCountedWhereTheyWere(t *testing.T) {
	n := New(Config{Threads: 4}, nil, nil)
	before, now := &service{held: 2}, &service{held: 1}
	var p pile
	p.queue = &invalidation.Queue{ID: 1}
	for i, s := range []*service{before, before, now} {
		lock := &invalidation.Lock{Token: invalidation.Token(i)}
		p.jobs = append(p.jobs, &assignment{lock: lock, service: s, home: &lane{held: 1}})
		p.endings = append(p.endings, last(invalidation.Done(lock, 1, nil, 0)))
	}
	n.free(p)
	if before.held != 0 || now.held != 0 {
		t.Errorf("%d and %d locks are held, want none: the queue's limit on this node would shift for ever", before.held, now.held)
	}
}

// The place in line is taken before the commit: of two pushes at once the second may be claimed before the first is seen.
func TestAClaimLooksAgainAtPlacesJustBeforeItsMark(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	lane := invalidation.Lane{Priority: 1}
	b.found(1, []invalidation.LaneHead{{Lane: lane, Pos: 500}})
	visit := b.take(&turns{}, nil, false, time.Now())
	c := invalidation.Claimed{Seen: 1, Mark: 600, Emptied: true, Locks: []*invalidation.Lock{{}}}
	b.advance(visit, c, false, 0)
	b.leave(visit, false, time.Time{})
	b.hint(1, &lane)
	if visit = b.take(&turns{}, nil, false, time.Now()); visit.fromHead || visit.from > 599 || visit.from < 400 {
		t.Errorf("the next claim begins at %d, want a little before 600", visit.from)
	}
	b.advance(visit, invalidation.Claimed{Seen: 1, Mark: 590, Left: 1}, false, 0)
	b.leave(visit, true, time.Time{})
	if visit = b.take(&turns{}, nil, false, time.Now()); visit.from != 591 {
		t.Errorf("after a row that somebody holds the next claim begins at %d, want 591", visit.from)
	}
}

// A key may come back into line, before the mark, while a thread claims behind it.
func TestARowThatCameBackDuringAClaimIsNotMissed(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	lane := invalidation.Lane{Priority: 1}
	b.found(1, []invalidation.LaneHead{{Lane: lane, Pos: 50}})
	v := b.take(&turns{}, nil, true, time.Now())
	b.again(1, invalidation.LaneHead{Lane: lane, Pos: 7})
	b.advance(v, invalidation.Claimed{Seen: 1, Emptied: true, Locks: []*invalidation.Lock{{}}, Mark: 50}, false, time.Millisecond)
	b.leave(v, false, time.Time{})
	if v = b.take(&turns{}, nil, true, time.Now()); v == nil || v.from > 7 {
		t.Errorf("the next claim is %+v, want one that begins at 7", v)
	}
}

// A claim may meet a ready row whose key's lock ends just then: nothing sweeps it, and nobody else comes by.
func TestALaneIsGoneBackToForARowThatWasLeftInIt(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 7}})
	now := time.Now()
	visit := func(c invalidation.Claimed, missed bool) time.Duration {
		v := b.take(&turns{}, nil, true, now)
		if v == nil {
			t.Fatal("nobody comes back for the row")
		}
		b.advance(v, c, missed, time.Millisecond)
		pause := time.Duration(0)
		work := b.more(v, c)
		if !work {
			pause = b.goBack(v)
			work = pause > 0
		}
		b.leave(v, work, now.Add(pause))
		now = now.Add(pause)
		return pause
	}
	left, none := invalidation.Claimed{Seen: 1, Left: 1, Mark: 7}, invalidation.Claimed{Emptied: true}
	for _, want := range []time.Duration{2, 4, 8} {
		visit(left, true)
		if pause := visit(none, false); pause != want*time.Millisecond {
			t.Errorf("the lane rests for %s, want %d ms", pause, want)
		}
	}
	if v := b.take(&turns{}, nil, true, now); v == nil || v.from > 7 {
		t.Errorf("the next claim is %+v, want one that begins at 7", v)
	}
}

// Flows may be named once and never again, each by a hint.
func TestLanesThatOnlyHintsNamedAreForgotten(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	for i := range 2 * rememberMax {
		lane := invalidation.Lane{Priority: 1, Flow: strconv.Itoa(i)}
		b.hint(1, &lane)
		b.lanes[flowKey{1, lane}].work = false // claimed and emptied
	}
	if n := len(b.lanes); n > rememberMax+1 {
		t.Errorf("the board remembers %d lanes without work", n)
	}
}
