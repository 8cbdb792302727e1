package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// severed is a database that heartbeats do not reach while cut is set.
type severed struct {
	*pgxpool.Pool
	cut atomic.Bool
}

type severedRow struct{}

func (severedRow) Scan(...any) error { return errors.New("no route to host") }

func (d *severed) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if d.cut.Load() {
		return severedRow{}
	}
	return d.Pool.QueryRow(ctx, sql, args...)
}

// recoverDead frees the locks that are named as the leader does after the death of their node, of which no heartbeat
// comes in between.
func recoverDead(t *testing.T, pool *pgxpool.Pool, q *invalidation.Queue, named func(invalidation.HeldLock) bool) {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		const silent = `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 hour'`
		if _, err := tx.Exec(t.Context(), silent); err != nil {
			return err
		}
		held, err := invalidation.HeldLocks(t.Context(), tx)
		if err != nil {
			return err
		}
		held = slices.DeleteFunc(held, func(l invalidation.HeldLock) bool { return !named(l) })
		r, err := q.WithTx(tx).Recover(t.Context(), refs(held), nil, true)
		if err == nil && len(r.Freed) != 1 {
			err = fmt.Errorf("recovered %v, want one lock", r)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A node that is cut off alone cannot know that its locks are freed meanwhile. When it is heard again the runs of those
// end, the others go on; and an entry that it claims again does not run beside the run that has not ended yet.
func TestRunsWhoseLocksWereFreedWhileTheNodeWasSilentEnd(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{Lapse: invalidation.LapseRunThrough})
	beats := &severed{Pool: pool}
	n := tasknode.New(tasknode.Config{
		Threads: 4, Lease: 12 * time.Second, Beat: time.Second, Poll: 20 * time.Millisecond,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}, pool, beats)
	running, ended := make(chan struct{}, 10), make(chan error, 10)
	leave, letLeave := barrier()
	goOn, letGo := barrier()
	var first, second, kept atomic.Int64 // runs
	n.Handle("work", invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if string(r.Entry.Payload) == `"kept"` {
			kept.Add(1)
			running <- struct{}{}
			select {
			case <-goOn:
				return nil, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if r.Entry.MayHaveRun {
			second.Add(1)
			return nil, nil
		}
		first.Add(1)
		running <- struct{}{}
		<-ctx.Done()
		ended <- context.Cause(ctx)
		<-leave
		return nil, ctx.Err()
	}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("node: %v", err)
		}
	})
	t.Cleanup(func() { letLeave(); letGo() })
	push(t, q, invalidation.Push{Payload: json.RawMessage(`"kept"`)})
	<-running
	id := push(t, q, invalidation.Push{Payload: json.RawMessage(`"freed"`)})[0].ID
	<-running
	taken := push(t, q, invalidation.Push{Payload: json.RawMessage(`"taken"`)})[0].ID
	<-running

	beats.cut.Store(true)
	eventuallyTrue(t, "the node knows that its lease is over", func() bool { return n.Stats().LeasesLost.Load() > 0 })
	recover := func(id invalidation.EntryID) {
		t.Helper()
		recoverDead(t, pool, q, func(l invalidation.HeldLock) bool { return l.Key == fmt.Sprintf("#%d", id) })
	}
	const other = 7 // another node, which takes one of the entries
	recover(taken)
	elsewhere, err := q.Claim(t.Context(), invalidation.ClaimRequest{
		Node: other, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1, IgnoreRowLocks: true,
	})
	if err != nil || len(elsewhere.Locks) != 1 {
		t.Fatalf("claimed %v: %v", elsewhere, err)
	}
	recover(id)
	beats.cut.Store(false)
	for range 2 {
		if err := <-ended; !errors.Is(err, invalidation.ErrLeaseLost) {
			t.Errorf("a run whose lock was freed was ended by %v", err)
		}
	}
	eventually(t, pool, "the entry was claimed and handed back",
		`SELECT EXISTS (SELECT FROM penstock.ready WHERE entry_id = $1 AND not_before IS NOT NULL)`, id)
	if n := second.Load(); n > 0 {
		t.Errorf("the entry ran %d times beside the run that had not ended", n)
	}
	letLeave()
	eventually(t, pool, "the entry ran anew", `SELECT EXISTS (SELECT FROM penstock.result WHERE entry_id = $1)`, id)
	letGo()
	finish := invalidation.Done(elsewhere.Locks[0], taken, nil, 0)
	finish.Last = true
	if ours, err := q.Settle(t.Context(), other, []invalidation.Ending{finish}); err != nil || len(ours) != 1 {
		t.Errorf("the other node recorded %v: %v", ours, err)
	}
	eventually(t, pool, "all done", emptySQL)
	if first.Load() != 2 || second.Load() != 1 || kept.Load() != 1 {
		t.Errorf("%d runs before and %d after the locks were freed, and %d of the one that was not, want 2, 1 and 1",
			first.Load(), second.Load(), kept.Load())
	}
}

// The monotonic clock stands still while a machine is suspended: the node believes its lease, which was over by the
// database's clock. Its first heartbeat after that says so, and runs whose locks were freed meanwhile end.
func TestRunsWhoseLocksWereFreedWhileTheMachineWasSuspendedEnd(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	n := tasknode.New(tasknode.Config{
		Threads: 2, Lease: time.Minute, Beat: time.Second, Poll: 20 * time.Millisecond,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}, pool, pool)
	running, ended := make(chan struct{}, 1), make(chan error, 1)
	n.Handle("work", invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if r.Entry.MayHaveRun {
			return nil, nil
		}
		running <- struct{}{}
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return nil, ctx.Err()
	}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("node: %v", err)
		}
	})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`{}`)})
	<-running
	recoverDead(t, pool, q, func(invalidation.HeldLock) bool { return true })
	select {
	case err := <-ended:
		if !errors.Is(err, invalidation.ErrLeaseLost) {
			t.Errorf("the run whose lock was freed was ended by %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the run whose lock was freed goes on")
	}
	if lost := n.Stats().LeasesLost.Load(); lost != 0 {
		t.Errorf("%d leases are lost by the node's own clock", lost)
	}
	eventually(t, pool, "the entry ran anew", emptySQL)
}
