package inference

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// After the clock was set back the next probe of an instance was due when the clock had caught up, and the slots of dead
// nodes stayed taken until then.
func TestAnInstanceIsProbedAfterTheClockWasSetBack(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	p := newProber(ProberConfig{}, b.pool, NewRegistry(b.pool, worker.Config{}, 0, quiet), quiet)
	set := func(checked, next string) {
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET checked_at = clock_timestamp() + $1::interval,
		                                     next_check_at = clock_timestamp() + $2::interval`, checked, next)
		b.must(err)
	}
	due := func(want int) {
		t.Helper()
		if due, err := p.claimDue(b.ctx, 10); err != nil || len(due) != want {
			t.Errorf("claimed %v, want %d; %v", due, want, err)
		}
	}
	set("0", "7 seconds") // more than the longest pause
	due(0)
	set("1 hour", "1 hour")
	due(1)
	due(0)

	node := b.node(time.Minute)
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.slot (instance_id, node_id, number, token) SELECT id, $1, 0, 1 FROM penstock.instance`, node)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = clock_timestamp() - lease - interval '2 seconds' WHERE id = $1`, node)
	b.must(err)
	set("0", "6 seconds")
	due(0)
	set("5 seconds", "6 seconds")
	due(1)
}
