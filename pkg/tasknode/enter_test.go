package tasknode_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// A connection that is lost while the node starts costs a wait, not the process.
func TestANodeWhoseDatabaseGoesAwayWhileItStartsWaits(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var lost atomic.Int64
	db := troubled{Pool: pool, query: func(_ context.Context, sql string) error {
		if strings.Contains(sql, "FROM penstock.queue") && lost.Add(1) == 1 {
			return &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}
		}
		return nil
	}}
	_, done := startOn(t, db, fine)
	push(t, q, payload(invalidation.Push{}))
	eventually(t, pool, "the entry has run", `SELECT count(*) = 1 FROM penstock.result`)
	select {
	case err := <-done:
		t.Errorf("the node ended: %v", err)
	default:
	}
	if lost.Load() < 2 {
		t.Error("no statement was lost: the test shows nothing")
	}
}

// Operators, and the explanation of an entry, read which queues a node serves from its row.
func TestQueuesThatCouldNotBeRegisteredAreRegisteredWithTheNextHeartbeat(t *testing.T) {
	pool := open(t)
	create(t, pool, "work", invalidation.Config{})
	beats := &unwritable{Pool: pool}
	n := tasknode.New(slowBeats(tasknode.Config{Threads: 1, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}), pool, beats)
	n.Handle("work", invalidation.HandlerFunc(fine))
	n.Handle("later", invalidation.HandlerFunc(fine))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("node: %v", err)
		}
	})
	eventually(t, pool, "the node serves one queue", `SELECT EXISTS (SELECT FROM penstock.node WHERE cardinality(queue_ids) = 1)`)
	beats.refuse.Store(1)
	create(t, pool, "later", invalidation.Config{})
	askedBeats(t, pool, n)
	if beats.refuse.Load() > 0 {
		t.Error("no registration failed: the test shows nothing")
	}
	eventually(t, pool, "the node serves two queues", `SELECT EXISTS (SELECT FROM penstock.node WHERE cardinality(queue_ids) = 2)`)
}

// unwritable is a database that refuses the next registrations of nodes.
type unwritable struct {
	*pgxpool.Pool
	refuse atomic.Int64
}

func (d *unwritable) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if strings.Contains(sql, "INSERT INTO penstock.node") && d.refuse.Load() > 0 {
		d.refuse.Add(-1)
		return pgconn.CommandTag{}, errors.New("connection reset by peer")
	}
	return d.Pool.Exec(ctx, sql, args...)
}

// A node that is asked to end while it starts ends without an error, and leaves no row.
func TestANodeThatIsStoppedWhileItStartsEndsWell(t *testing.T) {
	pool := open(t)
	create(t, pool, "work", invalidation.Config{})
	stopped := make(chan struct{})
	db := troubled{Pool: pool, query: func(ctx context.Context, sql string) error {
		if !strings.Contains(sql, "FROM penstock.queue") {
			return nil
		}
		<-stopped
		return ctx.Err()
	}}
	cancel, done := startOn(t, db, fine)
	cancel()
	close(stopped)
	if err := <-done; err != nil {
		t.Errorf("the node ended with %v", err)
	}
	eventually(t, pool, "no node is left", `SELECT count(*) = 0 FROM penstock.node`)
}

// Others would run the entries of a node that is silent for a lease while it works.
func TestANodeWhoseLeaseIsShorterThanThreeBeatsIsRefused(t *testing.T) {
	pool := open(t)
	create(t, pool, "work", invalidation.Config{})
	for _, c := range []tasknode.Config{{Lease: 5 * time.Second}, {Beat: 4 * time.Second}, {Lease: time.Second, Beat: time.Second}} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := tasknode.New(c, pool, pool).Run(ctx)
		cancel()
		if err == nil || !strings.Contains(err.Error(), "Lease") || !strings.Contains(err.Error(), "Beat") {
			t.Errorf("lease %s, beat %s: %v, want an error that names both fields", c.Lease, c.Beat, err)
		}
	}
}
