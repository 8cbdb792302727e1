package invalidation

import "testing"

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
