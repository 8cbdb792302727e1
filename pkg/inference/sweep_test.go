package inference

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Every node sends these statements. One that is planned over the tables of all queues locks each of them, with its
// indexes.
func TestSweepsLockTheTableOfTheirQueueAlone(t *testing.T) {
	b := newBed(t, worker.Model{})
	instance, node := b.instance("gpu-1", nowhere, 1), b.node(time.Minute)
	id := b.push(`{}`)[0]
	b.lease(node, 1)
	for _, sql := range []string{
		`SELECT penstock.create_queue('other')`,
		`UPDATE penstock.slot SET doubt_at = clock_timestamp()`,
		`INSERT INTO penstock.remote_run (queue_id, entry_id, token, instance_id, slot_number, slot_token, started_at)
		 SELECT e.queue_id, e.id, 1, s.instance_id, s.number, s.token, now() - interval '1 hour'
		   FROM penstock.entry e, penstock.slot s`,
		`SELECT penstock.make_output_partitions()`,
	} {
		_, err := b.pool.Exec(b.ctx, sql)
		b.must(err)
	}
	for _, entry := range []invalidation.EntryID{id, id + 1000} {
		_, _, err := noteHarm(b.ctx, b.pool, b.queue.ID, entry, instance, worker.ClassOOM)
		b.must(err)
	}
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.entry_harm SET at = at - interval '1 hour'`)
	b.must(err)
	b.must(pgx.BeginFunc(b.ctx, b.pool, func(tx pgx.Tx) error {
		var abandoned, locked int
		b.must(tx.QueryRow(b.ctx, abandonedSQL, b.model.Name).Scan(&abandoned))
		_, err := tx.Exec(b.ctx, sweepRunsSQL)
		b.must(err)
		_, err = tx.Exec(b.ctx, sweepHarmSQL)
		b.must(err)
		_, err = tx.Exec(b.ctx, sweepOutputSQL, outputMax)
		b.must(err)
		b.must(tx.QueryRow(b.ctx, `
SELECT count(DISTINCT l.relation) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation
 WHERE i.inhparent = 'penstock.entry'::regclass AND l.pid = pg_backend_pid()`).Scan(&locked))
		if abandoned != 1 || locked != 1 {
			t.Errorf("%d abandoned runs, want 1; the tables of %d queues are locked, want 1", abandoned, locked)
		}
		return nil
	}))
	if left := b.count(`SELECT count(*) FROM penstock.entry_harm`); left != 1 {
		t.Errorf("harm of %d entries is left, want that of the one that has not ended", left)
	}
}

// Each process counts its part of the probes towards its turn.
func TestProcessesTakeTurnsToSweep(t *testing.T) {
	for name, c := range map[string]struct{ processes, instances int }{
		"one": {1, 5}, "some": {10, 100}, "many": {50, 200}, "without instances": {1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			registry := NewRegistry(nil, worker.Config{}, 0, quiet)
			for id := range int32(c.instances) {
				registry.current.Load().instances[id] = &Endpoint{}
			}
			turns, taken := make([]func(int) bool, c.processes), 0
			for i := range turns {
				turns[i] = newSweeper(usualTuning(), nil, registry, quiet).turn
			}
			const minutes = 100
			for range minutes * 60 { // ticks, of which five make an interval
				probes := make([]int, c.processes)
				for range c.instances / 5 {
					probes[rand.IntN(c.processes)]++
				}
				for i, turn := range turns {
					if turn(probes[i]) {
						taken++
					}
				}
			}
			if taken < minutes/2 || taken > 2*minutes {
				t.Errorf("%d turns in %d minutes", taken, minutes)
			}
		})
	}
}
