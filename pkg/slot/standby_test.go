package slot

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// A node does not use a slot that a synchronous standby has not got: after a failover another node could lease it.
func TestSlotsOfALeaseWithoutAnAnswerAreFoundOnceTheStandbyHasThem(t *testing.T) {
	own := pgtest.ServerWith(t, map[string]string{"synchronous_commit": "on", "max_wal_senders": "1"})
	pool, err := pgxpool.New(t.Context(), own.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := newRackOn(t, pool)
	h := r.node(1)
	until := func(what, sql string) {
		t.Helper()
		reached := false
		for deadline := time.Now().Add(time.Minute); !reached; time.Sleep(2 * time.Millisecond) {
			if r.query(sql, &reached); !reached && time.Now().After(deadline) {
				t.Fatalf("waited for %s in vain", what)
			}
		}
	}
	const waits = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')`

	own.Standbys("away")
	given, giveUp := context.WithCancel(t.Context())
	leased := make(chan error, 1)
	go func() {
		_, err := h.Lease(given, "m", 2)
		leased <- err
	}()
	until("the wait of the lease", waits)
	giveUp()
	if err := <-leased; err == nil {
		t.Fatal("what was given up has succeeded")
	}
	until("the slots", `SELECT count(*) = 2 FROM penstock.slot`)
	until("the end of the wait", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')`)

	found := make(chan error, 1)
	go func() {
		held, err := h.Slots(t.Context())
		if err == nil && len(held.Slots) != 2 {
			t.Errorf("found %v", held.Slots)
		}
		found <- err
	}()
	select {
	case err := <-found:
		t.Fatalf("slots were found though the standby has not got them (%v)", err)
	case <-waiting(t, r, waits):
	}
	own.Standbys("")
	if err := <-found; err != nil {
		t.Fatal(err)
	}
}

// waiting is closed when a statement has returned true.
func waiting(t *testing.T, r *rack, sql string) <-chan struct{} {
	reached := make(chan struct{})
	go func() {
		defer close(reached)
		for is := false; !is && t.Context().Err() == nil; time.Sleep(2 * time.Millisecond) {
			if err := r.pool.QueryRow(t.Context(), sql).Scan(&is); err != nil && t.Context().Err() == nil {
				t.Error(err)
				return
			}
		}
	}()
	return reached
}
