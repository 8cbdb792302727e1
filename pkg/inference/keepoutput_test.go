package inference

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/worker"
)

// One model whose config was written by hand keeps no output of others.
func TestSweepOfOutputEndsWhateverAModelSays(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.hourLasts()
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.register_model('bad', '{"protocol": "openai", "keep_output": "maybe"}')`)
	if postgres.Code(err) != "PS002" {
		t.Errorf("keep_output that is neither true nor false: %v", err)
	}
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.model SET config = config || '{"keep_output": "maybe"}'`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `DO $$ DECLARE h timestamptz := date_trunc('hour', now()) - interval '3 hours'; BEGIN
		EXECUTE format('CREATE TABLE penstock.%I PARTITION OF penstock.output FOR VALUES FROM (%L) TO (%L)',
		               'output_' || to_char(h AT TIME ZONE 'UTC', 'YYYYMMDDHH24'), h, h + interval '1 hour'); END $$`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data, at)
		VALUES ($1, 1, 1, 1, 1, 'x', date_trunc('hour', now()) - interval '3 hours')`, b.queue.ID)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `SELECT penstock.make_output_partitions()`)
	b.must(err)
	var gone int
	b.must(b.pool.QueryRow(b.ctx, `SELECT penstock.sweep_output(10)`).Scan(&gone))
	if gone != 1 {
		t.Errorf("%d partitions were dropped, want the old one", gone)
	}
}

// A clock that jumps ahead for a moment drops no output that is kept; hours to come get their partitions all the same.
func TestNoOutputIsDroppedByAClockThatHasJumped(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.hourLasts()
	_, err := b.pool.Exec(b.ctx, `DO $$ DECLARE h timestamptz := date_trunc('hour', now()) - interval '3 hours'; BEGIN
		EXECUTE format('CREATE TABLE penstock.%I PARTITION OF penstock.output FOR VALUES FROM (%L) TO (%L)',
		               'output_' || to_char(h AT TIME ZONE 'UTC', 'YYYYMMDDHH24'), h, h + interval '1 hour'); END $$`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
		VALUES ('2020-01-01Z', $1, 'm', '', 1, 1, 0, 0, 0, 0)`, b.queue.ID)
	b.must(err)
	const old = `SELECT (SELECT count(*) FROM penstock.usage_hour)::int
	     + (SELECT count(*) FROM pg_inherits WHERE inhparent = 'penstock.output'::regclass
	         AND inhrelid::regclass::text = 'penstock.output_' || to_char(date_trunc('hour', now()) - interval '3 hours', 'YYYYMMDDHH24'))::int`
	s := newSweeper(usualTuning(), b.pool, nil, quiet)
	b.must(s.believed.Check(time.Now().Add(-5 * time.Hour))) // the time that has passed: the database's clock is ahead
	for range 2 {                                            // the first may have no more to do than to make partitions
		s.sweep(b.ctx)
	}
	if n := b.count(old); n != 2 {
		t.Errorf("%d of an old hour of output and of use are left, want both", n)
	}
	if n := b.count(`SELECT count(*) FROM pg_inherits WHERE inhparent = 'penstock.output'::regclass`); n < 5 {
		t.Errorf("output has %d partitions, want the old one, the default one and those of the next hours", n)
	}
	newSweeper(usualTuning(), b.pool, nil, quiet).sweep(b.ctx)
	if n := b.count(old); n != 0 {
		t.Errorf("by a clock that is believed %d are left", n)
	}
}
