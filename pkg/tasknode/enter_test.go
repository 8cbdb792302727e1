package tasknode_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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
