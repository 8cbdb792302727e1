package maintenance_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
)

func TestDutiesWorkWithoutPreparedStatements(t *testing.T) {
	direct := pgtest.New(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: direct.Config().ConnString(), Pooled: true, MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	f := newFleet(t, direct, invalidation.Config{Capacity: 100})
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '100 milliseconds')`)
	fence, cfg := &term{db: pool}, maintenance.Config{Pause: 20 * time.Millisecond}
	run(t, maintenance.NewDeadlines(pool, fence, cfg))
	depths := maintenance.NewDepths(pool, fence, cfg)
	run(t, depths)
	run(t, maintenance.NewOperations(pool, fence, cfg))
	eventually(t, "the entry is promoted", func() bool { return f.count(`SELECT count(*) FROM penstock.ready`) == 1 })
	eventually(t, "the queue is counted", func() bool { return depths.Counts() > 0 })
}
