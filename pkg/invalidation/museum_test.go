package invalidation

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A column of a heartbeat in an index, or a page without room, would make each heartbeat a new entry in all indexes.
func TestHeartbeatsAreHeapOnlyUpdates(t *testing.T) {
	b := newBed(t, Config{})
	b.must(b.pool.AcquireFunc(b.ctx, func(c *pgxpool.Conn) error {
		for beat := range 400 {
			tokens := make([]Token, beat%20) // rows of different lengths
			if _, err := Renew(b.ctx, c, here, Beat{Tokens: tokens, Running: tokens[:len(tokens)/2]}); err != nil {
				return err
			}
		}
		_, err := c.Exec(b.ctx, `SELECT pg_stat_force_next_flush()`)
		return err
	}))
	all := b.count(`SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = 'penstock.node'::regclass`)
	hot := b.count(`SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'penstock.node'::regclass`)
	if all < 400 || hot*100 < all*95 {
		t.Errorf("%d of %d updates of the node's row are heap-only, want 95 of 100 at least", hot, all)
	}
}

// A session that listens for hours holds no snapshot and no transaction: vacuum would keep every dead row behind it.
func TestAListenerHoldsNoSnapshot(t *testing.T) {
	b := newBed(t, Config{})
	l, _ := b.listen(ListenConfig{})
	b.await("connected", func() bool { return l.Status().Connected })
	b.push("")
	b.await("no session but this one has a transaction or a snapshot", func() bool {
		return b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
		    AND (state <> 'idle' OR backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)`) == 0
	})
	if !l.Status().Connected {
		t.Error("the listener is not connected any more")
	}
}
