package tasknode

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// stepped is a handler whose runs end one by one, when the test says so.
type stepped struct {
	began chan invalidation.EntryID
	now   atomic.Int64

	mu  sync.Mutex
	end map[invalidation.EntryID]chan struct{}
}

// ended returns the channel that ends the run of an entry.
func (s *stepped) ended(id invalidation.EntryID) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end[id] == nil {
		s.end[id] = make(chan struct{})
	}
	return s.end[id]
}

func (s *stepped) Handle(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
	s.now.Add(1)
	s.began <- r.Entry.ID
	<-s.ended(r.Entry.ID)
	s.now.Add(-1)
	return nil, nil
}

func steppedNode(t *testing.T, threads int) (*Node, *stepped) {
	n := New(Config{Threads: threads}, nil, nil)
	n.runs = t.Context()
	return n, &stepped{began: make(chan invalidation.EntryID), end: map[invalidation.EntryID]chan struct{}{}}
}

func (s *stepped) job(n *Node, quantum time.Duration, ids ...invalidation.EntryID) *job {
	j := assigned(ids...)
	j.handler, j.queue.Config.QuantumTime = s, quantum
	n.jobs.add(j)
	return j
}

// The first lock of another lane does not wait for a run to end: while all threads are busy the spare one takes it.
func TestTheFirstLockOfALaneStartsWhileAllThreadsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, s := steppedNode(t, 2)
		job := func(ids ...invalidation.EntryID) *job { return s.job(n, time.Minute, ids...) }
		var threads sync.WaitGroup
		threads.Go(n.spareThread)
		threads.Go(n.thread)
		threads.Go(n.thread)
		begins := func(want ...invalidation.EntryID) {
			t.Helper()
			var began []invalidation.EntryID
			for range want {
				synctest.Wait()
				select {
				case id := <-s.began:
					began = append(began, id)
				default:
					t.Fatalf("entries %v began, want %v", began, want)
				}
			}
			synctest.Wait()
			select {
			case id := <-s.began:
				t.Fatalf("entry %d began besides %v", id, want)
			default:
			}
			if slices.Sort(began); !slices.Equal(began, want) {
				t.Fatalf("entries %v began, want %v", began, want)
			}
		}
		n.waiting.add(true, job(1))
		begins(1) // on a processing thread: one is idle
		n.waiting.add(false, job(2), job(3))
		begins(2)
		n.waiting.add(true, job(4), job(5))
		begins(4) // on the spare thread; the next one waits for a run to end
		close(s.ended(2))
		begins(5)
		close(s.ended(5))
		begins(3)
		for _, id := range []invalidation.EntryID{1, 3, 4} {
			close(s.ended(id))
		}
		n.waiting.close()
		threads.Wait()
		if n.waiting.running != 0 || n.waiting.sparing {
			t.Errorf("%d threads run a job, the spare one too: %v", n.waiting.running, n.waiting.sparing)
		}
	})
}

// Urgent jobs and others take turns, but the locks of one lane keep their order.
func TestTheSecondLockOfALaneNeverGoesBeforeItsFirst(t *testing.T) {
	w := newWaiting(1)
	a, b := &lane{}, &lane{}
	of := func(l *lane) *job { return &job{servedLane: servedLane{lane: l}} }
	jobs := map[*job]string{of(b): "b1", of(a): "a1", of(a): "a2", of(b): "b2"}
	named := func(name string) *job {
		for j, n := range jobs {
			if n == name {
				return j
			}
		}
		return nil
	}
	w.add(true, named("b1"))
	w.add(true, named("a1"))
	w.add(false, named("a2"))
	w.add(false, named("b2"))
	var order []string
	for range jobs {
		order = append(order, jobs[w.next()])
		w.done()
	}
	if want := []string{"b1", "a1", "a2", "b2"}; !slices.Equal(order, want) {
		t.Errorf("jobs are taken in the order %v, want %v", order, want)
	}
}

// Where an urgent job has neither a thread nor the spare one, a group gives its thread up between two of its entries, and goes
// back to its position.
func TestAGroupGivesItsThreadUpForAnUrgentJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, s := steppedNode(t, 1)
		var threads sync.WaitGroup
		threads.Go(n.thread)
		n.waiting.add(false, s.job(n, time.Minute, 1, 2))
		<-s.began
		n.waiting.add(true, s.job(n, time.Minute, 9))
		time.Sleep(aheadTime)
		close(s.ended(1))
		if id := <-s.began; id != 9 {
			t.Fatalf("entry %d began, want that of the other lane", id)
		}
		close(s.ended(9))
		n.waiting.close()
		threads.Wait()
		var verbs []string
		for _, e := range n.settler.unsent[shard{queue: 1, part: 1}].endings {
			verbs = append(verbs, e.Verb())
		}
		if want := []string{"done", "release", "done"}; !slices.Equal(verbs, want) {
			t.Errorf("endings %v, want %v", verbs, want)
		}
	})
}

// noisyLast ranks lanes of other flows before that of the flow noisy.
type noisyLast struct{ *turns }

func (noisyLast) Next(dst []int, lanes []*fairness.Candidate, _ int, _ bool) []int {
	first := slices.IndexFunc(lanes, func(c *fairness.Candidate) bool { return c.Lane.Flow != "noisy" && !c.Taken })
	if first < 0 {
		first = slices.IndexFunc(lanes, func(c *fairness.Candidate) bool { return !c.Taken })
	}
	if first >= 0 {
		dst = append(dst, first)
	}
	return dst
}

// A lane that was refused has the turn of a group whose lane ranks behind it, but not that of one with as few locks here.
func TestAGroupGivesWayToALaneThatRanksBeforeItsOwn(t *testing.T) {
	table := newLaneTable(noisyLast{&turns{}})
	table.serve(map[int32]*servedQueue{1: {queue: &invalidation.Queue{ID: 1}}, 2: {queue: &invalidation.Queue{ID: 2}}})
	lane := func(flow string) invalidation.LaneHead {
		return invalidation.LaneHead{Lane: invalidation.Lane{Priority: 1, Flow: flow}, Position: 1}
	}
	now := time.Now()
	lease := func(queue int32, flow string) *laneLease {
		table.found(queue, []invalidation.LaneHead{lane(flow)})
		v := takeOne(table, nil, true, now)
		if v == nil || v.lane.key.lane.Flow != flow {
			t.Fatalf("leased %+v, want %s", v, flow)
		}
		return v
	}
	held := map[string]int{"noisy": 8}
	givesWay := func(own *laneLease) bool {
		now = now.Add(2 * giveWayEvery)
		return table.givesWay(own.lane, func(k laneKey) int { return held[k.lane.Flow] }, now)
	}
	noisy := lease(1, "noisy")
	table.end(noisy, drained, now, exactly)
	if givesWay(noisy) {
		t.Error("it gives way though no lane was refused")
	}
	quiet := lease(1, "quiet")
	table.endRefused(quiet, refusedByGate, now, lasting(time.Hour))
	if !givesWay(noisy) {
		t.Error("it does not yield to a lane of its queue that was refused")
	}
	held["quiet"] = 7
	if givesWay(noisy) {
		t.Error("it gives way to a lane that would hold as many locks as its own then")
	}
	held["quiet"] = 0
	other := lease(2, "noisy")
	table.end(other, drained, now, exactly)
	if givesWay(other) {
		t.Error("it gives way though the lane of another queue did not want a permit")
	}
	quiet.lane.want.permit = true
	if !givesWay(other) {
		t.Error("it does not yield a permit, which all queues share")
	}
	table.end(quiet, claimEnd{answer: invalidation.Claimed{Scanned: 1, Locks: make([]*invalidation.Lock, 1)}}, now, exactly)
	if givesWay(noisy) {
		t.Error("it gives way though the lane was claimed from")
	}
}
