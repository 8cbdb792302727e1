package tasknode

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A downstream that refuses connections for a moment, or has nothing to do yet, makes no run short: the node would claim
// minutes of work ahead, and then nothing of any queue.
func TestRunsThatEndInNothingDoNotMakeANodeClaimAhead(t *testing.T) {
	for name, answer := range map[string]error{
		"errors": errors.New("connection refused"), "snoozes": invalidation.Snooze(time.Second),
		"refusals": invalidation.NoCapacity(0, errors.New("busy")),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := New(Config{Threads: 64}, nil, nil)
				n.runs = t.Context()
				took, err := time.Minute, error(nil)
				var served *servedQueue
				process := func(ids ...invalidation.EntryID) {
					j := assigned(ids...)
					j.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
						time.Sleep(took)
						return nil, err
					})
					j.queue.Config.QuantumTime = time.Hour
					served = j.served
					n.jobs.add(j)
					n.process(j)
				}
				process(1)
				process(2, 3)
				took, err = time.Millisecond, answer
				for range 150 {
					process(1)
					process(2, 3)
				}
				if short := n.holdings.of(served).anyRun; short == 0 || short > aheadTime {
					t.Errorf("runs of a millisecond that end in nothing take %v on average", short)
				}
				if ahead := n.holdings.ahead(served, 64); ahead > 0 {
					t.Errorf("%d locks would be claimed ahead of 64 threads, whose runs take a minute", ahead)
				}
			})
		})
	}
}

// Runs of a millisecond turn into long ones when the node has claimed ahead of its threads.
func TestLocksThatWaitForLongRunsAreHandedBack(t *testing.T) {
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	pushes := make([]invalidation.Push, 15)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(`1`)
	}
	if _, err := q.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	n := New(Config{
		Threads: 1, Lease: time.Minute, Beat: 100 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}, pool, pool)
	n.holdings.queues[q.ID] = &holding{run: time.Millisecond, lock: 2 * time.Millisecond}
	end := make(chan struct{})
	n.Handle("work", invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		<-end
		return nil, nil
	}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		close(end)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run node: %v", err)
		}
	})
	// The first claim brings 11 locks. One runs, one waits for the thread.
	handedBack := func() (is bool) {
		err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM penstock.lock) = 2 AND (SELECT count(*) FROM penstock.ready) = 13
			AND (SELECT sum(attempt) + sum(crashes) FROM penstock.entry) = 0`).Scan(&is)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	for deadline := time.Now().Add(30 * time.Second); !handedBack(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the node holds %d locks for its thread, want 2", n.Held())
		}
	}
	if ahead := n.holdings.ahead(&servedQueue{id: q.ID}, 1); ahead > 0 {
		t.Errorf("%d locks would be claimed ahead again", ahead)
	}
}

// As many jobs as there are threads stay in the line, urgent ones first, and what was claimed a moment ago stays as well.
func TestTheFirstJobsOfTheLineStayInIt(t *testing.T) {
	now := time.Now()
	line := func(urgent, others int, age time.Duration) *waiting {
		w := newWaiting(2)
		for i := range urgent + others {
			w.add(i < urgent, &job{
				servedLane: servedLane{lane: &lane{}}, since: now.Add(-age),
				lock: &invalidation.Lock{ClaimedAt: now.Add(-time.Hour)}, // the claim waited in the database
			})
		}
		return w
	}
	for _, c := range []struct {
		name                   string
		urgent, others         int
		age                    time.Duration
		urgentStay, othersStay int
	}{
		{"no urgent one", 0, 5, time.Minute, 0, 2},
		{"one urgent", 1, 5, time.Minute, 1, 1},
		{"more urgent ones than threads", 5, 3, time.Minute, 2, 0},
		{"no more than threads", 1, 1, time.Minute, 1, 1},
		{"claimed a moment ago", 5, 5, time.Millisecond, 5, 5},
	} {
		w := line(c.urgent, c.others, c.age)
		late := w.late(now.Add(-time.Second))
		if w.urgent.len() != c.urgentStay || w.others.len() != c.othersStay || len(w.urgentLanes) != c.urgentStay {
			t.Errorf("%s: %d urgent jobs of %d lanes stay, and %d others; want %d and %d", c.name, w.urgent.len(),
				len(w.urgentLanes), w.others.len(), c.urgentStay, c.othersStay)
		}
		if out := c.urgent + c.others - c.urgentStay - c.othersStay; len(late) != out {
			t.Errorf("%s: %d jobs are taken out, want %d", c.name, len(late), out)
		}
	}
}
