package inference

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// Two models on one device: whatever nodes lease, the group never holds more slots than it has, and neither model waits for
// ever while the other has work.
func TestModelsOfADeviceGroupShareItsSlots(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.lastingDemands()
	other := "Other"
	_, err := RegisterModel(b.ctx, b.pool, worker.Model{Name: other, Protocol: worker.ProtocolGeneric}, By{})
	b.must(err)
	group := map[string]string{"device_group": "gpu-1"}
	for _, model := range []string{b.model.Name, other} {
		_, err := RegisterInstance(b.ctx, b.pool, model, "server", nowhere, 4, group, By{})
		b.must(err)
	}
	held := func() int {
		return b.count(`SELECT count(*) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id WHERE i.device_group = 'gpu-1'`)
	}
	lease := func(model string, node invalidation.NodeID, want int) []slot.Held {
		got, err := b.holder(node).Lease(b.ctx, model, want)
		b.must(err)
		return got.Slots
	}
	one, two := b.node(time.Minute), b.node(time.Minute)
	mine := lease(b.model.Name, one, 4)
	if len(mine) != 4 || len(lease(other, two, 4)) != 0 || held() != 4 {
		t.Fatalf("the group of 4 holds %d slots", held())
	}
	if share := b.count(`SELECT penstock.slot_share($1, $2)`, b.model.Name, one); share != 2 {
		t.Errorf("while the other model goes without, %d slots are this one's share, want 2", share)
	}
	b.giveBack(one, mine[:2]...)
	if got := lease(other, two, 4); len(got) != 2 || held() != 4 {
		t.Errorf("the other model got %d slots, and %d are held", len(got), held())
	}
	_, err = b.pool.Exec(b.ctx, `SELECT penstock.set_device_group('gpu-1', 6)`)
	b.must(err)
	lease(other, two, 4)
	if held() != 6 {
		t.Errorf("%d slots are held of 6", held())
	}
	if _, err := b.pool.Exec(b.ctx, `SELECT penstock.set_device_group('gpu-1', -1)`); err == nil {
		t.Error("-1 slots were taken")
	}
}

func TestConcurrentLeasesNeverExceedADeviceGroup(t *testing.T) {
	b := newBed(t, worker.Model{})
	models := []string{b.model.Name, "Second", "Third"}
	for _, m := range models[1:] {
		_, err := RegisterModel(b.ctx, b.pool, worker.Model{Name: m, Protocol: worker.ProtocolGeneric}, By{})
		b.must(err)
	}
	for _, m := range models {
		for i := range 2 {
			_, err := RegisterInstance(b.ctx, b.pool, m, fmt.Sprint("server-", i), nowhere, 3, map[string]string{"device_group": fmt.Sprint("gpu-", i)}, By{})
			b.must(err)
		}
	}
	const enough = 50 // leases, however busy the machine is
	began, least := time.Now(), pgtest.Long(time.Second/2, 2*time.Second)
	ctx, stop := context.WithTimeout(b.ctx, time.Minute)
	defer stop()
	var crew sync.WaitGroup
	var leases atomic.Int64
	leaseAndReturn := func(model string, node invalidation.NodeID) error {
		holder := b.holder(node)
		got, err := holder.Lease(b.ctx, model, 1+rand.IntN(4))
		if err != nil {
			return err
		}
		leases.Add(int64(len(got.Slots)))
		return holder.Return(b.ctx, got.Slots)
	}
	for n := range 6 {
		node, model := b.node(time.Minute), models[n%3]
		crew.Go(func() {
			for ctx.Err() == nil {
				if err := leaseAndReturn(model, node); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for ctx.Err() == nil {
		if n := b.count(`SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id GROUP BY i.device_group) g`); n > 3 {
			t.Errorf("a device group of 3 slots holds %d", n)
		}
		if time.Since(began) > least && leases.Load() >= enough {
			stop()
		}
	}
	crew.Wait()
	if leases.Load() < enough {
		t.Errorf("%d leases, want %d at least", leases.Load(), enough)
	}
}
