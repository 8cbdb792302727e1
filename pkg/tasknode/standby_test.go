package tasknode

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// stepped is a handler whose runs end one by one, when the test says so.
type stepped struct {
	began chan invalidation.EntryID
	end   map[invalidation.EntryID]chan struct{}
	now   atomic.Int64
}

func (s *stepped) Handle(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
	s.now.Add(1)
	s.began <- r.Entry.ID
	<-s.end[r.Entry.ID]
	s.now.Add(-1)
	return nil, nil
}

func steppedNode(t *testing.T, threads int) (*Node, *stepped) {
	n := New(Config{Threads: threads}, nil, nil)
	n.runs = t.Context()
	return n, &stepped{began: make(chan invalidation.EntryID), end: map[invalidation.EntryID]chan struct{}{}}
}

func (s *stepped) job(n *Node, quantum time.Duration, ids ...invalidation.EntryID) *assignment {
	job := assigned(ids...)
	job.handler, job.queue.Config.QuantumTime = s, quantum
	for _, id := range ids {
		s.end[id] = make(chan struct{})
	}
	n.desk.add(job)
	return job
}

// The first lock of another lane does not wait for a run to end, and the thread that comes free next waits in its stead: so
// there is one run more than threads, and only until then.
func TestTheFirstLockOfALaneStartsWhileAllThreadsRun(t *testing.T) {
	n, s := steppedNode(t, 2)
	job := func(ids ...invalidation.EntryID) *assignment { return s.job(n, time.Minute, ids...) }
	group, solo, other := job(1, 2), job(3), job(9)
	claiming, drained := context.WithCancel(t.Context())
	gone := make(chan struct{}, 3)
	for _, thread := range []func(){n.processor, n.processor, func() { n.standby(claiming) }} {
		go func() { thread(); gone <- struct{}{} }()
	}
	n.work <- group
	n.work <- solo
	<-s.began
	<-s.began
	n.express <- other
	if id := <-s.began; id != 9 {
		t.Fatalf("entry %d began, want that of the other lane", id)
	}
	close(s.end[1])
	select {
	case id := <-s.began:
		t.Errorf("entry %d began while there was a run for each thread", id)
	case <-time.After(50 * time.Millisecond):
	}
	if now := s.now.Load(); now != 2 {
		t.Errorf("%d runs at once, want one a thread", now)
	}
	close(s.end[9])
	if id := <-s.began; id != 2 {
		t.Errorf("entry %d began, want the next of the group", id)
	}
	close(s.end[2])
	close(s.end[3])
	drained()
	close(n.work)
	for range 3 {
		<-gone
	}
	if _, p := n.settler.next(); len(p.endings) != 4 {
		t.Errorf("%d endings, want 4", len(p.endings))
	}
}

// Between two entries of a group another lane's lock may be let go first, by the thread itself or by the standby for which it waits.
// Others may have the group when its time is over, however long that takes.
func TestAGroupThatMakesWayGoesBackWhenItsTimeIsOver(t *testing.T) {
	for name, threads := range map[string]int{"the thread runs it": 1, "the standby runs it": 2} {
		t.Run(name, func(t *testing.T) {
			n, s := steppedNode(t, threads)
			group, solo, other := s.job(n, 200*time.Millisecond, 1, 2), s.job(n, time.Minute, 3), s.job(n, time.Minute, 9)
			claiming, drained := context.WithCancel(t.Context())
			var gone sync.WaitGroup
			for range threads {
				gone.Go(n.processor)
			}
			n.work <- group
			<-s.began
			if threads > 1 {
				gone.Go(func() { n.standby(claiming) })
				n.work <- solo
				<-s.began
			}
			n.express <- other
			if threads > 1 {
				<-s.began
			}
			close(s.end[1])
			if threads == 1 {
				if id := <-s.began; id != 9 {
					t.Fatalf("entry %d began, want that of the other lane", id)
				}
			}
			ended := 0
			for deadline := time.Now().Add(10 * time.Second); ended < 2; time.Sleep(time.Millisecond) {
				n.settler.mu.Lock()
				ended = 0
				for _, p := range n.settler.piles {
					ended += len(p.endings)
				}
				n.settler.mu.Unlock()
				if time.Now().After(deadline) {
					t.Fatal("the group stays locked while another lane's entry runs")
				}
			}
			if _, p := n.settler.next(); len(p.endings) != 2 || p.endings[1].Verb() != "yield" || p.endings[1].Entry != 2 {
				t.Errorf("endings %v, want that of entry 1 and a yield before 2", p.endings)
			}
			close(s.end[9])
			close(s.end[3])
			drained()
			close(n.work)
			gone.Wait() // nobody takes what would begin
		})
	}
}
