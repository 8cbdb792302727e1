package maintenance

import (
	"slices"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// A pass of samples that has no time left goes on with the next one, and what it has measured is there at once.
func TestSamplingOfManyQueuesGoesOnWhereItEnded(t *testing.T) {
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO penstock.queue (name) SELECT 'q' || i FROM generate_series(1, 999) i`) // and the one of webhooks
	exec(`CREATE SEQUENCE measured`)
	exec(`CREATE OR REPLACE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample LANGUAGE sql AS $$
	          SELECT jsonb_populate_record(NULL::penstock.sample, jsonb_build_object('queue_id', q.id, 'at', clock_timestamp(),
	                 'initial', nextval('measured'), 'pending', 0, 'disabled', 0, 'computing', 0, 'failed', 0, 'estimated', false,
	                 'serving', 0, 'accepted', 0, 'gone', 0, 'dead_tuples', 0)) $$`)
	s := NewSamples(pool, open{pool}, Config{})
	s.limit.Max, s.budget = 100, 0
	for pass := 1; ; pass++ {
		before := len(s.Latest().Queues)
		if _, err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		now := s.Latest().Queues
		if before == 1000 || pass > 100 {
			break
		}
		if n := len(now) - before; n < 1 || n > 100 {
			t.Fatalf("pass %d measured %d queues, want 1 to 100", pass, n)
		}
		var stored int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.sample`).Scan(&stored); err != nil || stored != len(now) {
			t.Fatalf("%d samples of %d queues are stored (%v)", stored, len(now), err)
		}
	}
	second := 0
	for i, q := range s.Latest().Queues {
		if i > 0 && q.QueueID <= s.Latest().Queues[i-1].QueueID {
			t.Fatalf("sample %d is of queue %d, behind queue %d", i, q.QueueID, s.Latest().Queues[i-1].QueueID)
		}
		if q.Initial > 1000 {
			second++
		}
	}
	if n := len(s.Latest().Queues); n != 1000 || second == 0 || second > 100 {
		t.Errorf("%d of %d queues are measured anew in the first pass of the second round", second, n)
	}
	exec(`DELETE FROM penstock.queue WHERE name = 'q1'`)
	for s.after = 0; s.after == 0 || len(s.Latest().Queues) == 1000; {
		if _, err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if slices.ContainsFunc(s.Latest().Queues, func(q Sample) bool { return q.Queue == "q1" }) {
		t.Error("a queue that was dropped has a sample")
	}
}
