package invalidation

import (
	"fmt"
	"testing"
	"time"
)

// A statement over the parent of the tables of entries locks each of them with its indexes. Heartbeats of many nodes would fill
// the lock table where there are hundreds of queues.
func TestAHeartbeatLocksNoTableOfEntries(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "")
	b.claim(9)
	for _, id := range ids {
		b.exec(b.pool, `SELECT penstock.cancel_entry($1, 'no', 'ann')`, id)
	}
	tx := b.begin()
	orders, err := Renew(b.ctx, tx, here, Beat{})
	b.must(err)
	b.want(len(orders.Cancel), 2)
	var tables int
	b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'penstock.entry%'`).Scan(&tables))
	b.want(tables, 0)
}

// The id of an entry does not tell its queue, so that a look-up reads each of them. What it locks of each must not be all
// of its indexes, but for the first time in a session.
func TestALookUpByIDLocksOneIndexOfEachQueue(t *testing.T) {
	b := newBed(t, Config{})
	const queues = 30
	for i := range queues {
		b.exec(b.pool, `SELECT penstock.create_queue($1)`, fmt.Sprint("queue", i))
	}
	ids := b.push("")
	conn, err := b.pool.Acquire(b.ctx)
	b.must(err)
	defer conn.Release()
	locks := func() (found int, locks int) {
		tx, err := conn.Begin(b.ctx)
		b.must(err)
		defer func() { _ = tx.Rollback(b.ctx) }()
		b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM penstock.find_entry($1) f WHERE f.queue_name = 'work'`, ids[0]).Scan(&found))
		b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'penstock.entry%'`).Scan(&locks))
		return found, locks
	}
	_, first := locks()
	found, again := locks()
	b.want(found, 1)
	if again > 3*(queues+1) || again < queues {
		t.Errorf("a look-up holds %d locks with %d queues, and the first of its session %d", again, queues+1, first)
	}
	t.Logf("%d queues: %d locks for the first look-up of a session, %d for another", queues+1, first, again)
}

// A node whose registration was not answered registers again, and takes its lease to begin then: it would run entries
// when the lease is over. Once it is heard, heartbeats alone renew the lease: they list its locks.
func TestARegistrationThatIsRepeatedBeginsTheLeaseAnew(t *testing.T) {
	b := newBed(t, Config{})
	node := Node{ID: here, Name: "here", Application: "default", Lease: time.Hour, Queues: []int32{b.q.ID}}
	silent := func() int {
		b.exec(b.pool, `UPDATE penstock.node SET beat_at = beat_at - interval '1 minute' WHERE id = $1`, here)
		b.must(Register(b.ctx, b.pool, node))
		return b.count(`SELECT count(*) FROM penstock.node WHERE id = $1 AND beat_at < started_at`, here)
	}
	b.want(silent(), 0)
	_, err := Renew(b.ctx, b.pool, here, Beat{})
	b.must(err)
	b.want(silent(), 1)
}
