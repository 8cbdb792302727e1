package inference

import (
	"testing"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/worker"
)

// One model whose config was written by hand keeps no output of others.
func TestSweepOfOutputEndsWhateverAModelSays(t *testing.T) {
	b := newBed(t, worker.Model{})
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
