package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// troubled is a database to which things happen.
type troubled struct {
	*pgxpool.Pool
	query func(ctx context.Context, sql string) error
	lost  func(sql string) error // of an answer, when the statement is committed
	// answered is called when all rows of a query were read, before their reader hears of it.
	answered func(sql string)
}

// slowRows calls answered once at their end.
type slowRows struct {
	pgx.Rows
	answered func()
}

func (r *slowRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.answered()
	}
	return more
}

func (d troubled) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.query != nil {
		if err := d.query(ctx, sql); err != nil {
			return nil, err
		}
	}
	rows, err := d.Pool.Query(ctx, sql, args...)
	if err == nil && d.lost != nil {
		if lost := d.lost(sql); lost != nil {
			rows.Close()
			return nil, errors.Join(lost, rows.Err())
		}
	}
	if err == nil && d.answered != nil {
		return &slowRows{rows, sync.OnceFunc(func() { d.answered(sql) })}, nil
	}
	return rows, err
}

func startOn(t *testing.T, db troubled, h invalidation.HandlerFunc) (cancel func(), done chan error) {
	n := tasknode.New(tasknode.Config{Threads: 2, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}, db, db.Pool)
	n.Handle("work", h)
	ctx, cancel := context.WithCancel(context.Background())
	done = make(chan error, 1)
	go func() { done <- n.Run(ctx); close(done) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run node: %v", err)
		}
	})
	return cancel, done
}

func fine(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil }

// The claim of a group is committed before its entries are read.
func TestAClaimIsFoundAgainWhenItsEntriesCouldNotBeRead(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var once sync.Once
	startOn(t, troubled{Pool: pool, query: func(_ context.Context, sql string) (err error) {
		if strings.Contains(sql, "ORDER BY id LIMIT $4") {
			once.Do(func() { err = &pgconn.PgError{Severity: "ERROR", Code: "57014"} })
		}
		return err
	}}, fine)
	push(t, q, invalidation.Push{LockKey: "k", Payload: json.RawMessage(`1`)})
	eventually(t, pool, "the group ran", emptySQL)
}

// The transaction is committed and its answer lost, as in a failover: nothing ran twice, and no lock was lost.
func TestEndingsWhoseAnswerWasLostAreNotRefused(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var once sync.Once
	n := tasknode.New(tasknode.Config{Threads: 2, Log: slog.New(slog.NewTextHandler(t.Output(), nil))},
		troubled{Pool: pool, lost: func(sql string) (err error) {
			if strings.Contains(sql, "DELETE FROM penstock.lock") {
				once.Do(func() { err = errors.New("connection reset") })
			}
			return err
		}}, pool)
	n.Handle("work", invalidation.HandlerFunc(fine))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	eventually(t, pool, "the entry ran", emptySQL)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s := n.Stats(); s.Refused.Load() != 0 || s.Repeated.Load() != 1 || s.Settled.Load() != 1 {
		t.Errorf("%d refused, %d repeated, %d settled; want 0, 1, 1", s.Refused.Load(), s.Repeated.Load(), s.Settled.Load())
	}
}

// What of a claim of several lanes was committed runs once, each entry as of its own lane.
func TestAClaimOfSeveralLanesIsFoundAgainWhenItsAnswerWasLost(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	const flows, each = 20, 3
	for range each {
		for i := range flows {
			push(t, q, invalidation.Push{Flow: fmt.Sprint(i), Payload: json.RawMessage(`1`)})
		}
	}
	var once sync.Once
	var lost atomic.Bool
	var mu sync.Mutex
	ran := map[invalidation.EntryID]int{}
	startOn(t, troubled{Pool: pool, lost: func(sql string) (err error) {
		if strings.Contains(sql, "penstock lane") {
			once.Do(func() { lost.Store(true); err = errors.New("connection reset") })
		}
		return err
	}}, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		mu.Lock()
		defer mu.Unlock()
		ran[r.Entry.ID]++
		return nil, nil
	})
	eventually(t, pool, "all ran", emptySQL)
	mu.Lock()
	defer mu.Unlock()
	if !lost.Load() {
		t.Error("no claim of several lanes was made")
	}
	for id, times := range ran {
		if times != 1 {
			t.Errorf("entry %d ran %d times", id, times)
		}
	}
	if len(ran) != flows*each {
		t.Errorf("%d entries ran, want %d", len(ran), flows*each)
	}
}

// Cut off, a claim may be committed after the node looked for it: its locks would count as the death of a node.
func TestADrainDoesNotCutOffAClaim(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	var cancel func()
	begun := make(chan struct{})
	var once sync.Once
	var cut atomic.Bool
	cancel, done := startOn(t, troubled{Pool: pool, query: func(ctx context.Context, sql string) error {
		if strings.Contains(sql, "penstock lane") {
			once.Do(func() {
				<-begun
				cancel()
				cut.Store(ctx.Err() != nil)
			})
		}
		return nil
	}}, fine)
	close(begun)
	if err := <-done; err != nil {
		t.Errorf("run node: %v", err)
	}
	if cut.Load() {
		t.Error("the drain ended a claim that was on its way")
	}
	eventually(t, pool, "nothing held", `SELECT NOT EXISTS (SELECT FROM penstock.lock)`)
}

// Nothing begins behind the order to stop, however long the last claim takes.
func TestADrainThatWaitsForAClaimBeginsNoRun(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var hang atomic.Bool
	var once sync.Once
	var runs atomic.Int64
	hangs, late, begun := make(chan struct{}), make(chan struct{}), make(chan struct{}, 9)
	released, release := barrier()
	goOn, letGo := barrier()
	cancel, done := startOn(t, troubled{Pool: pool, query: func(ctx context.Context, sql string) error {
		if strings.Contains(sql, "penstock lane") && hang.Load() {
			once.Do(func() {
				close(hangs)
				<-ctx.Done() // a heartbeat after the drain began
				close(late)
				<-released
			})
		}
		return nil
	}}, func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		runs.Add(1)
		begun <- struct{}{}
		<-goOn
		return nil, nil
	})
	t.Cleanup(func() { letGo(); release() })
	push(t, q, invalidation.Push{LockKey: "k", Payload: json.RawMessage(`1`)}, invalidation.Push{LockKey: "k", Payload: json.RawMessage(`2`)})
	<-begun
	hang.Store(true)
	push(t, q, invalidation.Push{Payload: json.RawMessage(`3`)})
	<-hangs
	cancel()
	<-late
	letGo()
	eventually(t, pool, "the lock of the key is released", `SELECT NOT EXISTS (SELECT FROM penstock.lock WHERE lock_key = 'k')`)
	release()
	if err := <-done; err != nil {
		t.Errorf("run node: %v", err)
	}
	if n := runs.Load(); n != 1 {
		t.Errorf("%d entries ran, want the one that had begun", n)
	}
}

func TestEndingsThatCannotBeRecordedDoNotHoldUpOthers(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	if _, err := pool.Exec(t.Context(), `ALTER TABLE penstock.failure ADD CHECK (class NOT IN ('bad', 'result'))`); err != nil {
		t.Fatal(err)
	}
	startOn(t, troubled{Pool: pool}, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		switch string(r.Entry.Payload) {
		case `"fail"`:
			return nil, invalidation.Permanent(invalidation.WithClass("bad", errors.New("no")))
		case `"note"`:
			r.Note(json.RawMessage(`{"text": "\u0000"}`))
		case `"garbled"`:
			r.Note(json.RawMessage(`{`))
			return nil, invalidation.Permanent(errors.New("no"))
		}
		return nil, nil
	})
	for range 2 {
		for _, p := range []string{`"fail"`, `"note"`, `"garbled"`} {
			push(t, q, invalidation.Push{Payload: json.RawMessage(p)})
		}
	}
	eventually(t, pool, "notes left out", `SELECT (SELECT count(*) FROM penstock.result) = 2 AND (SELECT count(*) FROM penstock.failure) = 2`)
	for range 20 {
		push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	}
	eventually(t, pool, "others done", `SELECT count(*) = 22 FROM penstock.result`)
}

// While a node is cut off, others may be given what it holds. What it claimed before runs no more, even if the lease is
// back before its turn comes; and the node is at work again at once, however long its lease.
func TestWhatWasClaimedBeforeTheLeaseWasLostRunsUnderANewTokenOnly(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var dead atomic.Int64   // tokens up to this one are of the life before; 0 while that lasts
	var noticed atomic.Bool // the node has begun to end the runs of that life
	var late atomic.Int64   // runs of that life that began later and were not ended
	var one atomic.Bool     // a run goes on after it was ended, until again
	running := make(chan struct{}, 100)
	again, letGo := barrier()
	const threads = 8 // a lock at least is claimed ahead of them as long as a short run takes less than 160 ms
	start(t, pool, tasknode.Config{Threads: threads, SchedulingThreads: 1, Lease: time.Minute, Beat: 200 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
			before := dead.Load() == 0 || int64(r.Lock.Token) <= dead.Load()
			if before && string(r.Entry.Payload) == `"stay"` {
				running <- struct{}{}
				<-ctx.Done()
				noticed.Store(true)
				if one.CompareAndSwap(false, true) {
					<-again
				}
				return nil, ctx.Err()
			}
			// Until the node knows of its loss, it goes on with what it had claimed. A run that begins while it ends
			// them one after another is ended with them.
			if dead.Load() > 0 && before && noticed.Load() {
				select {
				case <-ctx.Done():
				case <-time.After(time.Minute):
					late.Add(1)
				}
			}
			return nil, nil
		},
	})
	t.Cleanup(letGo)
	short := make([]invalidation.Push, 100) // so short that others are claimed while they run
	for i := range short {
		short[i].Payload = json.RawMessage(`1`)
	}
	push(t, q, short...)
	eventually(t, pool, "short ones done", emptySQL)
	for i := range 20 {
		short[i].Payload = json.RawMessage(`"stay"`)
	}
	push(t, q, short...)
	for range threads { // all are taken by runs that last
		<-running
	}
	eventually(t, pool, "some wait behind", `SELECT count(*) > $1 FROM penstock.lock`, threads)

	held, err := invalidation.HeldLocks(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range held {
		dead.Store(max(dead.Load(), int64(l.Token)))
	}
	if _, err := pool.Exec(t.Context(), `DELETE FROM penstock.node`); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Recover(t.Context(), refs(held), nil, false); err != nil {
		t.Fatal(err)
	}
	// Locks under new tokens may come and go between two readings; results only grow, and under a dead token there is none.
	eventually(t, pool, "the node claims again", `SELECT count(*) > 100 FROM penstock.result`)
	letGo()
	eventually(t, pool, "all done", emptySQL)
	if late.Load() > 0 {
		t.Errorf("%d runs under dead tokens began after the node knew of its loss", late.Load())
	}
}

// A queue that is gone makes its endings fail for ever. Those of others are recorded, and its locks are not listed any more.
func TestEndingsOfADroppedQueueDoNotHoldUpOthers(t *testing.T) {
	pool := open(t)
	gone, other := create(t, pool, "gone", invalidation.Config{}), create(t, pool, "other", invalidation.Config{})
	var begun sync.WaitGroup
	goOn, letGo := barrier()
	node, _ := start(t, pool, tasknode.Config{Threads: 12, Lease: time.Minute, Beat: time.Second}, map[string]invalidation.HandlerFunc{
		"gone": func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			begun.Done()
			<-goOn
			return nil, nil
		},
		"other": fine,
	})
	t.Cleanup(letGo)
	begun.Add(8)
	for range 8 {
		push(t, gone, invalidation.Push{Payload: json.RawMessage(`1`)})
	}
	begun.Wait()
	if _, err := pool.Exec(t.Context(), `DROP TABLE penstock.entry_gone CASCADE`); err != nil {
		t.Fatal(err)
	}
	letGo()
	for range 20 {
		push(t, other, invalidation.Push{Payload: json.RawMessage(`1`)})
	}
	eventually(t, pool, "the other queue's entries are done", `SELECT count(*) = 20 FROM penstock.result`)
	for node.Stats().Unrecorded.Load() < 8 { // the test's own timeout ends it
		time.Sleep(5 * time.Millisecond)
	}
	eventually(t, pool, "none of its locks is listed", `SELECT cardinality(tokens) = 0 FROM penstock.node`)
	if left := node.Stats().Unrecorded.Load(); left != 8 {
		t.Errorf("%d endings were left to recovery, want 8", left)
	}
}

// A claim's answer that took so long that the leader may have freed its locks brings nothing that is run.
func TestAClaimThatIsAnsweredLateIsHandedBack(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var late atomic.Bool
	var tooOld atomic.Int64 // runs under the claim that was answered late
	var mu sync.Mutex
	tokens := map[invalidation.Token]bool{}
	const lease = 6 * time.Second // nothing recovers the locks of a node that loses it
	db := troubled{Pool: pool, answered: func(sql string) {
		if strings.Contains(sql, "penstock.ready") && strings.Contains(sql, "penstock.lock") && late.CompareAndSwap(false, true) {
			held, err := invalidation.HeldLocks(context.Background(), pool)
			if err != nil || len(held) == 0 {
				late.Store(false) // not the claim
				return
			}
			mu.Lock()
			for _, l := range held {
				tokens[l.Token] = true
			}
			mu.Unlock()
			time.Sleep(lease * 3 / 4)
		}
	}}
	n := tasknode.New(tasknode.Config{Threads: 2, Lease: lease, Beat: 100 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}, db, pool)
	n.Handle("work", invalidation.HandlerFunc(func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		mu.Lock()
		defer mu.Unlock()
		if tokens[r.Lock.Token] {
			tooOld.Add(1)
		}
		return nil, nil
	}))
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)}, invalidation.Push{LockKey: "k", Payload: json.RawMessage(`2`)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run node: %v", err)
		}
	})
	eventually(t, pool, "all done", `SELECT count(*) = 2 FROM penstock.result`)
	if !late.Load() || tooOld.Load() > 0 {
		t.Errorf("%d runs began under a claim that was answered late (there was one: %v)", tooOld.Load(), late.Load())
	}
}
