package invalidation

import (
	"fmt"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// What a claim of a hundred entries reads must not grow with what it does not take: entries that are not due, dead
// letters, a key with many entries at the head, rows that are dead but cannot be vacuumed. Many are 100,000, whose
// pages alone are beyond the bound of a claim, and a million with PENSTOCK_LONG=1.
func TestUnracedClaimCostStaysFlat(t *testing.T) {
	b := newBed(t, Config{PayloadLimit: groupBytes / 100}) // the quantum of the first claim is quantum_count
	b.freeze()
	many := pgtest.Long(100_000, 1_000_000)
	b.exec(b.pool, `SELECT setval('penstock.entry_id_seq', 2000000)`) // leaves room at the head
	x := b.explainer()
	claim := func(from int64) int {
		s := statement{b.q.sql.claim.lockFirst, b.claimArgs(from)}
		x.explain("claim", s)
		return x.explain("claim", s).buffers()
	}
	b.fill(1000)
	base := claim(0)
	flat := func(what string, got int, ratio float64) {
		t.Helper()
		t.Logf("%-36s %6d buffers, %d with a thousand entries alone", what, got, base)
		if float64(got) > ratio*float64(base) {
			t.Errorf("with %s a claim reads %d buffers, %d without", what, got, base)
		}
	}

	b.exec(b.pool, `INSERT INTO penstock.entry_work (id, queue_id, status, priority, due_at, payload)
	    SELECT nextval('penstock.entry_id_seq'), $1, 'initial', 1, now() + interval '1 day', '{}' FROM generate_series(1, $2)`, b.q.ID, many)
	flat(fmt.Sprint(many, " future entries"), claim(0), 1.5)

	b.exec(b.pool, `DROP INDEX penstock.failure_fingerprint, penstock.failure_entry`) // for speed alone: no claim reads them
	b.exec(b.pool, `INSERT INTO penstock.failure (queue_id, entry_id, created_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
	    SELECT $1, -i, now(), 1, 1, 0, '', 'error', '', '', '{}' FROM generate_series(1, $2) i`, b.q.ID, many)
	flat(fmt.Sprint(many, " failures"), claim(0), 1.5)

	b.exec(b.pool, `INSERT INTO penstock.entry_work (id, queue_id, status, priority, lock_key, payload)
	    SELECT i, $1, 'pending', 1, 'hot', '{}' FROM generate_series(1, $2) i`, b.q.ID, many)
	b.exec(b.pool, `INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key) VALUES ($1, 1, '', 1, 'hot')`, b.q.ID)
	flat(fmt.Sprint(many, " entries of a free hot key"), claim(0), 1.5)

	hot := b.claimOne()
	if hot.Key != "hot" || len(hot.Entries) != 100 {
		t.Fatalf("claimed %s with %d entries, want a quantum of the hot key", hot.Key, len(hot.Entries))
	}
	for range 3 {
		b.push("hot") // each leaves a ready row, for the one before is swept or taken
		if n, err := b.q.Sweep(b.ctx, soloLane, 0, 1<<40); n != 1 || err != nil {
			t.Fatalf("swept %d (%v)", n, err)
		}
	}
	b.push("hot")
	flat(fmt.Sprint(many, " entries of a locked hot key"), claim(0), 1.5)
	b.settle(doneAll(hot)...)

	// A snapshot that is held keeps 20000 dead ready rows at the head. From the mark on, nobody walks over them.
	b.fill(30_000)
	held := b.begin()
	b.exec(held, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)
	b.exec(held, `SELECT FROM penstock.ready LIMIT 1`)
	var mark int64
	for range 20 {
		c := b.claimAs(ClaimRequest{Node: here, Lane: soloLane, Limit: 1000, From: mark})
		b.settle(doneAll(c.Locks...)...)
		mark = c.LowWater
	}
	b.exec(b.pool, `VACUUM penstock.ready`)
	fromMark, fromHead := claim(mark), claim(0)
	flat("a held snapshot, from the mark on", fromMark, 1.5)
	if fromHead < fromMark+200 { // 20000 rows are some 200 pages
		t.Errorf("from the head a claim reads %d buffers, from the mark %d: the snapshot held nothing, and this test tests nothing", fromHead, fromMark)
	}
	b.commit(held)
	b.exec(b.pool, `TRUNCATE penstock.entry_work, penstock.ready, penstock.failure`)
}
