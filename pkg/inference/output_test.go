package inference

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// An hour of output is dropped whole once nobody reads it: its size does not matter to the sweep.
func TestHoursOfOutputAreDropped(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.hourLasts()
	hour := func(ago time.Duration) string {
		at := time.Now().UTC().Add(-ago).Truncate(time.Hour)
		name := "penstock.output_" + at.Format("2006010215")
		_, err := b.pool.Exec(b.ctx, fmt.Sprintf(`CREATE TABLE %s PARTITION OF penstock.output FOR VALUES FROM ('%s') TO ('%s')`,
			name, at.Format(time.RFC3339), at.Add(time.Hour).Format(time.RFC3339)))
		b.must(err)
		_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data, at)
			SELECT $1, 1, 1, 1, n, 'x', $2 FROM generate_series(1, 100) n`, b.queue.ID, at)
		b.must(err)
		return name
	}
	rows := func(name string) int { return b.count(`SELECT count(*) FROM ` + name) }
	there := func(name string) bool { return b.count(`SELECT count(to_regclass($1))`, name) == 1 }
	old, recent := hour(5*time.Hour), hour(time.Hour)

	// What makes partitions drops none: it would wait for readers of the table, who wait for the default partition.
	locked := func() int {
		tx, err := b.pool.Begin(b.ctx)
		b.must(err)
		_, err = tx.Exec(b.ctx, `SELECT penstock.sweep_output(10)`)
		b.must(err)
		var n int
		b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock'
			AND relation IN ('penstock.output'::regclass, 'penstock.output_default'::regclass)`).Scan(&n))
		b.must(tx.Commit(b.ctx))
		return n
	}
	if n := locked(); n != 1 || !there(old) {
		t.Errorf("the sweep that makes partitions locks %d tables, want the default partition; old one %v", n, there(old))
	}
	b.count(`SELECT penstock.sweep_output(10)`)
	if there(old) || !there(recent) {
		t.Errorf("after the sweep: old %v, recent %v", there(old), there(recent))
	}
	if n := b.count(`SELECT count(*) FROM pg_inherits WHERE inhparent = 'penstock.output'::regclass`); n < 5 {
		t.Errorf("%d partitions, want those of the next hours", n)
	}

	// A run that began then still writes, or a model keeps what it streams: nothing is dropped.
	old = hour(6 * time.Hour)
	id := b.push(`{}`)[0]
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id,
		entry_count, cost, priority, flow, lock_key) VALUES (7, 7, 1, $1, now() - interval '1 day', $2, 1, 1, 0, 1, '', '#1')`,
		int64(id), b.queue.ID)
	b.must(err)
	if b.count(`SELECT penstock.sweep_output(10)`); !there(old) {
		t.Error("output of a run that goes on was dropped")
	}
	_, err = b.pool.Exec(b.ctx, `DELETE FROM penstock.lock`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `SELECT penstock.set_model_override(model, '{"keep_output": true}') FROM penstock.queue WHERE id = $1`, b.queue.ID)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `SELECT penstock.register_model('other', '{"protocol": "openai"}')`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data, at)
		SELECT q.id, 1, 1, 1, n, 'x', (SELECT min(at) FROM `+old+`) FROM penstock.queue q, generate_series(1, 12) n WHERE q.name = 'other'`)
	b.must(err)
	whole := hour(5 * time.Hour) // is younger, and goes first: it is dropped in one step
	_, err = b.pool.Exec(b.ctx, `UPDATE `+whole+` SET queue_id = (SELECT id FROM penstock.queue WHERE name = 'other')`)
	b.must(err)
	if b.count(`SELECT penstock.sweep_output(10)`); there(whole) || rows(old) != 112 {
		t.Errorf("an hour that nobody keeps is there: %v; of the one before it %d rows, want all", there(whole), rows(old))
	}
	for _, left := range []int{102, 100, 100} { // the other model keeps nothing, and its rows go
		if b.count(`SELECT penstock.sweep_output(10)`); !there(old) || rows(old) != left {
			t.Errorf("of output that one model keeps and the other does not: there %v, want %d rows", there(old), left)
		}
	}
	_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data, at)
		SELECT q.id, 2, 1, 1, n, 'x', (SELECT min(at) FROM `+old+`) FROM penstock.queue q, generate_series(1, $1) n
		 WHERE q.name = 'other'`, 2*outputMax+1)
	b.must(err)
	b.must(newSweeper(usualTuning(), b.pool, nil, quiet).sweepOutput(b.ctx, time.Hour))
	if n := rows(old); n != 100 {
		t.Errorf("one sweep leaves %d rows, want those of the model that keeps its output", n)
	}
	_, err = b.pool.Exec(b.ctx, `SELECT penstock.delete_model_override(model) FROM penstock.queue WHERE id = $1`, b.queue.ID)
	b.must(err)
	if b.count(`SELECT penstock.sweep_output(10)`); there(old) {
		t.Error("output that nobody keeps is still there")
	}
}
