package operator_test

import (
	"testing"
	"time"

	. "github.com/penstock/penstock/pkg/invalidation"
)

// What left a queue before its first sample counts where the queue was made within the period. Of an older one it is not
// known when it left.
func TestTrendsCountWhatLeftANewQueueBeforeItsFirstSample(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	b.exec(b.pool, `INSERT INTO penstock.sample (queue_id, at, initial, pending, disabled, computing, failed, estimated, serving, accepted, gone, dead_tuples)
SELECT $1, now() - n * interval '5 s', 0, 0, 0, 0, 0, false, 1, 143, 143 + 3 - n, 0 FROM generate_series(1, 3) n`, b.q.ID)
	gone := func() (sum int64) {
		points, err := b.d.Trends(b.ctx, 15*time.Minute, 15*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range points {
			sum += p.Gone
		}
		return sum
	}
	if n := gone(); n != 145 {
		t.Errorf("143 entries left before the first sample and 2 after it: %d are counted", n)
	}
	b.exec(b.pool, `UPDATE penstock.queue SET created_at = now() - interval '1 day' WHERE id = $1`, b.q.ID)
	if n := gone(); n != 2 {
		t.Errorf("143 entries left an older queue before the first sample and 2 after it: %d are counted", n)
	}
}
