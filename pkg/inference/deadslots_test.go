package inference

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

func TestSlotsOfDeadNodesAreListedAndFreedByHand(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	b.instance("gpu-2", nowhere, 2)
	dead, alive := b.node(time.Minute), b.node(time.Minute)
	b.lease(dead, 3)
	b.lease(alive, 1)
	if found, err := DeadSlots(b.ctx, b.pool, ""); err != nil || len(found) != 0 {
		t.Fatalf("with both nodes alive: %v, %v", found, err)
	}
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = now() - interval '1 hour' WHERE id = $1`, dead)
	b.must(err)
	found, err := DeadSlots(b.ctx, b.pool, b.model.Name)
	b.must(err)
	slots := 0
	for _, d := range found {
		slots += d.Slots
		if d.Node != dead || d.Model != b.model.Name || time.Since(d.Since) < 0 {
			t.Errorf("found %+v", d)
		}
	}
	if slots != 3 || len(found) != 2 {
		t.Errorf("%d slots on %d instances are listed, want 3 on 2", slots, len(found))
	}
	one, err := FreeDeadSlots(b.ctx, b.pool, b.model.Name, "gpu-1", By{Actor: "ada", Reason: "its host is gone"})
	b.must(err)
	rest, err := FreeDeadSlots(b.ctx, b.pool, b.model.Name, "", By{Actor: "ada", Reason: "its host is gone"})
	b.must(err)
	if one == 0 || one+rest != 3 || b.count(`SELECT count(*) FROM penstock.slot`) != 1 {
		t.Errorf("freed %d and then %d of 3", one, rest)
	}
	if n := b.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'free_dead_slots' AND actor = 'ada' AND reason = 'its host is gone'`); n != 2 {
		t.Errorf("%d rows of the audit", n)
	}
	if _, err := FreeDeadSlots(b.ctx, b.pool, "nothing", "", By{}); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("of a model that is not registered: %v", err)
	}
}

func TestUsageIsListedByHour(t *testing.T) {
	b := newBed(t, worker.Model{})
	_, err := b.pool.Exec(b.ctx, `
		INSERT INTO penstock.usage_hour (hour, queue_id, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, model, flow)
		SELECT date_trunc('hour', now()) - h * interval '1 hour', $1, 1, 100, 10, 7, 5, 3, $2, 'flow-' || f
		  FROM generate_series(0, 4) h, generate_series(0, 2) f`, b.queue.ID, b.model.Name)
	b.must(err)
	all, err := UsageHours(b.ctx, b.pool, UsageFilter{})
	b.must(err)
	if len(all) != 15 || all[0].Queue != b.queue.Name || all[0].Application != "default" || all[0].GPUMS != 100 || all[0].TokensCached != 5 {
		t.Fatalf("%d rows, the first %+v", len(all), all[0])
	}
	var paged []UsageHour
	for f := (UsageFilter{Limit: 4}); ; f.After = &paged[len(paged)-1] {
		page, err := UsageHours(b.ctx, b.pool, f)
		b.must(err)
		if len(page) == 0 {
			break
		}
		paged = append(paged, page...)
	}
	if fmt.Sprint(paged) != fmt.Sprint(all) {
		t.Errorf("pages bring %v, want %v", paged, all)
	}
	some, err := UsageHours(b.ctx, b.pool, UsageFilter{From: all[3].Hour, To: all[6].Hour, Flow: "flow-1"})
	b.must(err)
	if len(some) != 1 || some[0].Flow != "flow-1" || !some[0].Hour.Equal(all[3].Hour) {
		t.Errorf("one flow of one hour: %+v", some)
	}
}

// Two models on one device: whatever nodes lease, the group never holds more slots than it has, and neither model waits for
// ever while the other has work.
func TestModelsOfADeviceGroupShareItsSlots(t *testing.T) {
	b := newBed(t, worker.Model{})
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
	lease := func(model string, node invalidation.NodeID, want int) []leasedSlot {
		rows, err := b.pool.Query(b.ctx, leaseSlotsSQL, model, node, want)
		b.must(err)
		got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[leasedSlot])
		b.must(err)
		return got
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
	b.must(SetDeviceGroup(b.ctx, b.pool, "gpu-1", 6, By{Actor: "ada"}))
	lease(other, two, 4)
	if held() != 6 {
		t.Errorf("%d slots are held of 6", held())
	}
	if err := SetDeviceGroup(b.ctx, b.pool, "gpu-1", -1, By{}); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("-1 slots: %v", err)
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
	ctx, stop := context.WithTimeout(b.ctx, 2*time.Second)
	defer stop()
	var crew sync.WaitGroup
	var leases atomic.Int64
	for n := range 6 {
		crew.Go(func() {
			node, model := b.node(time.Minute), models[n%3]
			for ctx.Err() == nil {
				rows, err := b.pool.Query(b.ctx, leaseSlotsSQL, model, node, 1+rand.IntN(4))
				b.must(err)
				got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[leasedSlot])
				b.must(err)
				leases.Add(int64(len(got)))
				b.giveBack(node, got...)
			}
		})
	}
	for ctx.Err() == nil {
		if n := b.count(`SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id GROUP BY i.device_group) g`); n > 3 {
			t.Errorf("a device group of 3 slots holds %d", n)
		}
	}
	crew.Wait()
	if leases.Load() < 50 {
		t.Errorf("%d leases", leases.Load())
	}
}
