package invalidation

import (
	"fmt"
	"sync"
	"testing"
)

// Changes of models, instances and queues take the lock of all limits before any row, and inference_version last: of
// sessions that make them at once none is ended by a deadlock.
func TestLongModelsInstancesAndQueuesAreChangedInOneLockOrder(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.register_model('old', '{"protocol": "cog"}')`)
	const rounds = 25
	var changes sync.WaitGroup
	for _, sql := range []string{
		`SELECT penstock.register_model('model-%d', '{"protocol": "cog"}')`,
		`SELECT penstock.create_queue('made_%d', '{"kind": "inference", "model": "old"}')`,
		`SELECT penstock.register_instance('old', 'registered-%d', 'http://127.0.0.1:9/', 1)`,
		`SELECT penstock.announce_instance('old', 'announced-%d', 'http://127.0.0.1:9/', 1)`,
		`SELECT penstock.set_model_override('old', '{"max_retries": %d}')`,
		`SELECT penstock.alter_queue('work', jsonb_build_object('model', CASE WHEN %d %% 2 = 0 THEN 'old' END))`,
		`SELECT penstock.drain_instance('old', server, 'test') FROM penstock.instance WHERE id %% 25 = %d ORDER BY id LIMIT 1`,
	} {
		changes.Go(func() {
			for i := range rounds {
				if _, err := b.pool.Exec(b.ctx, fmt.Sprintf(sql, i)); err != nil {
					t.Errorf("%s: %v", fmt.Sprintf(sql, i), err)
					return
				}
			}
		})
	}
	changes.Wait()
}
