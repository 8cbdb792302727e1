package recovery_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

func TestRecoveryWorksWithoutPreparedStatements(t *testing.T) {
	direct := pgtest.New(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: direct.Config().ConnString(), Pooled: true, MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	f := newFleet(t, direct, invalidation.Config{})
	node := f.register(shortLease)
	f.push(2, "")
	f.claim(node, 2)
	f.lapse(node, time.Minute)
	run(t, recovery.NewLocks(pool, &term{db: pool}, recovery.Config{Pause: 20 * time.Millisecond, NodeRetention: time.Second}))
	eventually(t, "the locks are freed", func() bool { return f.locks() == 0 })
	eventually(t, "the node is removed", func() bool { return f.count(`SELECT count(*) FROM penstock.node`) == 0 })
}
