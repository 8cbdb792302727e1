package penstocktest

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Ran is one run of an entry.
type Ran struct {
	Entry  invalidation.Entry
	Key    string          // its lock key; "#" and its id for a solo entry
	Result json.RawMessage // what the handler returned
	Err    error           // what the handler returned
}

// RunOne runs the entry that a node would run next, and records how it ended. It fails the test if there is none.
func RunOne(t testing.TB, db postgres.DB, queue string, h invalidation.Handler) Ran {
	t.Helper()
	r := newRunner(t, db, queue, h)
	ran := r.pass(1)
	if len(ran) == 0 {
		t.Fatalf("queue %q has no entry to run", queue)
	}
	return ran[0]
}

// Drain runs entries until the queue has none that could start, and records how they ended. Retries
// and deferred entries stay until they are due, see MakeDue; an entry that is handed back
// (NoCapacity) is not run again.
func Drain(t testing.TB, db postgres.DB, queue string, h invalidation.Handler) []Ran {
	t.Helper()
	r := newRunner(t, db, queue, h)
	var all []Ran
	for {
		ran := r.pass(100)
		all = append(all, ran...)
		if len(ran) == 0 {
			return all
		}
	}
}

// runner is a node of one thread.
type runner struct {
	t       testing.TB
	db      postgres.DB
	q       *invalidation.Queue
	h       invalidation.Handler
	node    invalidation.NodeID
	claims  int32
	stopped map[invalidation.EntryID]bool // ran and was handed back: running it again would never end
}

func newRunner(t testing.TB, db postgres.DB, queue string, h invalidation.Handler) *runner {
	t.Helper()
	return &runner{
		t: t, db: db, q: open(t, db, queue), h: h, node: invalidation.NodeID(rand.Int64N(1<<62) + 1),
		stopped: map[invalidation.EntryID]bool{},
	}
}

// pass claims up to limit locks, best lane first, and runs what they cover: one entry of one lock if limit is 1.
func (r *runner) pass(limit int) []Ran {
	r.t.Helper()
	if _, err := r.q.Promote(r.t.Context(), 1<<20); err != nil {
		r.t.Fatal(err)
	}
	lanes, err := invalidation.Lanes(r.t.Context(), r.db, []int32{r.q.ID}, 1<<20)
	if err != nil {
		r.t.Fatal(err)
	}
	var ran []Ran
	for _, head := range lanes[r.q.ID] {
		r.claims++
		c, err := r.q.Claim(r.t.Context(), invalidation.ClaimRequest{
			Node: r.node, ClaimID: r.claims, Lane: head.Lane, Limit: limit, IgnoreRowLocks: true,
		})
		if err != nil {
			r.t.Fatal(err)
		}
		for _, l := range c.Locks {
			ran = append(ran, r.run(l, limit == 1)...)
		}
		if limit == 1 && len(ran) > 0 {
			return ran
		}
	}
	return ran
}

// run runs the entries of a lock; alone stops it after the first.
func (r *runner) run(l *invalidation.Lock, alone bool) []Ran {
	r.t.Helper()
	var ran []Ran
	if batch, ok := r.h.(invalidation.BatchHandler); ok && !r.stopped[l.Entries[0].ID] {
		return r.runBatch(batch, l)
	}
	for i, e := range l.Entries {
		if r.stopped[e.ID] || (alone && i > 0) {
			r.settle(last(invalidation.Release(l, e.ID, 0)))
			return ran
		}
		start := time.Now()
		run := &invalidation.Run{Queue: r.q, Entry: e, Lock: l, Node: r.node, Began: start}
		result, err := r.handle(run)
		ending := invalidation.Judge(run, result, err, time.Since(start), 0)
		ending.Last = i == len(l.Entries)-1 || r.q.EndsLock(&ending)
		r.settle(ending)
		ran = append(ran, Ran{e, l.Key, result, err})
		r.stopped[e.ID] = err != nil
		if ending.Last {
			break
		}
	}
	return ran
}

func (r *runner) runBatch(h invalidation.BatchHandler, l *invalidation.Lock) []Ran {
	r.t.Helper()
	runs := make([]*invalidation.Run, len(l.Entries))
	for i, e := range l.Entries {
		runs[i] = &invalidation.Run{Queue: r.q, Entry: e, Lock: l, Node: r.node}
	}
	answers := h.HandleBatch(r.t.Context(), runs)
	if len(answers) != len(runs) {
		r.t.Fatalf("handler answered %d of %d entries", len(answers), len(runs))
	}
	endings, ran := make([]invalidation.Ending, len(runs)), make([]Ran, len(runs))
	for i, a := range answers {
		endings[i] = invalidation.Judge(runs[i], a.Result, a.Err, 0, 0)
		ran[i] = Ran{runs[i].Entry, l.Key, a.Result, a.Err}
		r.stopped[runs[i].Entry.ID] = a.Err != nil
	}
	endings[len(endings)-1].Last = true
	r.settle(endings...)
	return ran
}

// handle calls the handler as a node does: a panic is an error.
func (r *runner) handle(run *invalidation.Run) (result json.RawMessage, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
		}
	}()
	return r.h.Handle(r.t.Context(), run)
}

func (r *runner) settle(endings ...invalidation.Ending) {
	r.t.Helper()
	ours, err := r.q.Settle(r.t.Context(), r.node, endings)
	if err == nil && len(ours) == 0 {
		err = fmt.Errorf("settle: %w", invalidation.ErrLockLost)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func last(e invalidation.Ending) invalidation.Ending {
	e.Last = true
	return e
}
