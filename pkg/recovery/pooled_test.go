package recovery_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

func TestDutiesWorkWithoutPreparedStatements(t *testing.T) {
	direct := pgtest.New(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: direct.Config().ConnString(), Pooled: true, MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	f := newFleet(t, direct, invalidation.Config{Capacity: 100})
	node := f.register(shortLease)
	f.push(2, "")
	f.claim(node, 2)
	f.lapse(node, time.Minute)
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '100 milliseconds')`)
	fence, cfg := &term{db: pool}, recovery.Config{Pause: 20 * time.Millisecond, NodeRetention: time.Second}
	run(t, recovery.NewLocks(pool, fence, cfg))
	run(t, recovery.NewDeadlines(pool, fence, cfg))
	statistics := recovery.NewStatistics(pool, fence, cfg)
	run(t, statistics)
	run(t, recovery.NewOperations(pool, fence, cfg))
	eventually(t, "the locks are freed", func() bool { return f.locks() == 0 })
	eventually(t, "the node is removed", func() bool { return f.count(`SELECT count(*) FROM penstock.node`) == 0 })
	eventually(t, "the entry is promoted", func() bool { return f.count(`SELECT count(*) FROM penstock.ready`) == 3 })
	eventually(t, "the queue is counted", func() bool { return statistics.Counts() > 0 })
}
