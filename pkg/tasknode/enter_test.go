package tasknode_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
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
