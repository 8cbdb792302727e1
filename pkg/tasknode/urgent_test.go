package tasknode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// Lanes of which the node holds nothing go first, but not one after another: what it has claimed has its turns as well.
func TestWhatIsClaimedRunsThoughOtherLanesNeverRunDry(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var bulk, others atomic.Int64
	n, _ := start(t, pool, tasknode.Config{Threads: 2}, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			time.Sleep(5 * time.Millisecond)
			if string(r.Entry.Payload) == `"bulk"` {
				bulk.Add(1)
			} else {
				others.Add(1)
			}
			return nil, nil
		},
	})
	pushes := func(flow, payload string, n int) (list []invalidation.Push) {
		for range n {
			list = append(list, invalidation.Push{Flow: flow, Payload: json.RawMessage(payload)})
		}
		return list
	}
	// As many as two threads run in 15 s at least: a busy machine may take some seconds to push the others.
	push(t, q, pushes("bulk", `"bulk"`, 6000)...)
	n.Wake(q.ID, nil)
	eventuallyTrue(t, "some ran", func() bool { return bulk.Load() > 50 })
	for i := range 40 {
		push(t, q, pushes(fmt.Sprintf("flow-%d", i), `1`, 100)...)
	}
	eventuallyTrue(t, "others run", func() bool { return others.Load() > 40 })
	before, beside := bulk.Load(), others.Load()
	if left := 6000 - before; left < 200 {
		t.Fatalf("%d are left of the flow that was there first: the test shows nothing", left)
	}
	for more := int64(200); more <= 1200; more += 200 { // a minute for each 200, however busy the machine is
		eventuallyTrue(t, "others go on", func() bool { return others.Load()-beside >= more })
	}
	if ran, all := bulk.Load()-before, others.Load()-beside; ran*120 < all { // its part is 1 of 41
		t.Errorf("%d runs of the flow that was there first, beside %d of 40 others", ran, all)
	}
}
