package tasknode

import (
	"context"
	"encoding/json"
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

// The first lock of another lane does not wait for a run to end, and the thread that comes free next waits in its stead: so
// there is one run more than threads, and only until then.
func TestTheFirstLockOfALaneStartsWhileAllThreadsRun(t *testing.T) {
	s := &stepped{began: make(chan invalidation.EntryID), end: map[invalidation.EntryID]chan struct{}{}}
	n := New(Config{Threads: 2}, nil, nil)
	n.runs = t.Context()
	job := func(ids ...invalidation.EntryID) *assignment {
		job := assigned(ids...)
		job.handler, job.queue.Config.QuantumTime = s, time.Minute
		for _, id := range ids {
			s.end[id] = make(chan struct{})
		}
		n.desk.add(job)
		return job
	}
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
