package inference

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// The limit on a run holds over all nodes that follow it, and not for each of them anew.
func TestNodesThatFollowARunShareItsLimit(t *testing.T) {
	t.Run("handed over", func(t *testing.T) {
		model := asyncModel()
		model.Timeouts.Start = worker.Seconds(time.Second)
		b := newBed(t, model)
		w := b.longWorker(`{}`)
		b.instance("gpu-1", w.URL, 1)
		first := b.start(ServiceConfig{})
		id := b.push(`{}`)[0]
		awaitAtLeast(t, &w.polls, 5) // 80 ms at least
		first.leave()
		first.drain(invalidation.ErrDraining)
		first.work.Wait()
		if n := b.count(`SELECT ran_ms FROM penstock.remote_run`); n < 80 {
			t.Errorf("%d ms of the run are charged", n)
		}
		// Nobody has followed it since, and what it was charged is known.
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run SET started_at = now() - interval '11 minutes'`)
		b.must(err)
		polls := w.polls.Load()
		b.start(ServiceConfig{})
		awaitAtLeast(t, &w.polls, polls+2)
		w.finished.Store(true)
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 || w.cancels.Load() != 0 {
			t.Errorf("outcome %+v after %d cancels", o, w.cancels.Load())
		}
	})
	t.Run("after a crash", func(t *testing.T) {
		model := asyncModel()
		model.Timeouts.Start = worker.Seconds(time.Second)
		b := newBed(t, model)
		w := b.longWorker(`{"cancelled":true}`)
		b.instance("gpu-1", w.URL, 1)
		first := b.start(ServiceConfig{})
		b.push(`{}`)
		awaitAtLeast(t, &w.polls, 1)
		first.die()
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run SET started_at = now() - interval '11 minutes'`)
		b.must(err)
		b.start(ServiceConfig{})
		awaitAtLeast(t, &w.cancels, 1) // it does not go on beyond max_poll_time
		w.finished.Store(true)
		b.await(0, `SELECT count(*) FROM penstock.entry`)
		if n := b.count(`SELECT attempts FROM (SELECT (meta->>'attempts')::int AS attempts FROM penstock.result) r`); n != 2 {
			t.Errorf("%d attempts, want 2", n)
		}
	})
}
