package tasknode

import (
	"errors"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Each of the two scheduling threads would ask for a lease for the locks of a claim on a queue that was dropped, and
// claim nothing from others meanwhile.
func TestClaimOfAQueueThatWasDroppedIsResolvedAtOnce(t *testing.T) {
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SELECT penstock.drop_queue('work')`); err != nil {
		t.Fatal(err)
	}
	n := &Node{cfg: Config{Lease: time.Minute}.withDefaults()}
	start := time.Now()
	claimed := n.resolve(t.Context(), q, invalidation.LanesRequest{Node: 1, ClaimID: 1}, make([]*laneLease, 1), errors.New("the table is gone"))
	if took := time.Since(start); len(claimed) != 1 || len(claimed[0].Locks) != 0 || took > n.cfg.Lease/2 {
		t.Errorf("resolved as %v after %v", claimed, took)
	}
}
