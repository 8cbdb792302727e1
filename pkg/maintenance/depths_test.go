package maintenance_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
)

func TestDepthOfABoundedQueueIsCountedAnew(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{Capacity: 10})
	f.push(10, "")
	f.exec(`DELETE FROM penstock.entry`) // without the counters
	run(t, maintenance.NewDepths(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond, CountPause: 20 * time.Millisecond}))
	eventually(t, "pushes are admitted again", func() bool {
		_, err := f.q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{}`)})
		return err == nil
	})
}
