package tasknode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// TestHeavyEntriesGetTheirUnitsBesideEndlessLightOnes has two nodes share 8 units between light entries that never run out, in
// flows of the same queue and in another queue, and entries that need all of them, or most.
func TestHeavyEntriesGetTheirUnitsBesideEndlessLightOnes(t *testing.T) {
	pool := open(t)
	create(t, pool, "work", invalidation.Config{MaxWeight: 8})
	create(t, pool, "other", invalidation.Config{})
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`SELECT penstock.set_limit('slots', '{"max_units": 8}'), penstock.use_limit('work', 'slots'), penstock.use_limit('other', 'slots')`)
	var used, light, heavy atomic.Int64
	// A light entry runs until four others have started, so that there are always some: units come free all together only
	// when no other may start.
	handle := func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		var weight int64
		if err := json.Unmarshal(r.Entry.Payload, &weight); err != nil {
			return nil, err
		}
		if now := used.Add(weight); now > 8 {
			t.Errorf("%d units are in use, limit 8", now)
		}
		defer used.Add(-weight)
		if weight > 1 {
			heavy.Add(1)
			return nil, nil
		}
		mine := light.Add(1)
		for end := time.Now().Add(time.Second); light.Load() < mine+4 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		return nil, nil
	}
	for range 2 {
		start(t, pool, tasknode.Config{Threads: 8},
			map[string]invalidation.HandlerFunc{"work": handle, "other": handle})
	}
	pushTo := func(queue, flow string, weight int32, n int) {
		t.Helper()
		q, err := invalidation.Open(t.Context(), pool, queue)
		if err != nil {
			t.Fatal(err)
		}
		push(t, q, slices.Repeat([]invalidation.Push{{Flow: flow, Weight: weight, Payload: json.RawMessage(fmt.Sprint(weight))}}, n)...)
	}
	refill := func() {
		t.Helper()
		for _, lane := range [][2]string{{"work", "light"}, {"work", ""}, {"other", ""}} {
			var waiting int
			if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry_status WHERE queue = $1 AND flow = $2 AND state = 'pending'`,
				lane[0], lane[1]).Scan(&waiting); err != nil {
				t.Fatal(err)
			}
			if waiting < 30 {
				pushTo(lane[0], lane[1], 1, 60)
			}
		}
	}
	eventuallyTrue(t, "light entries run", func() bool {
		refill()
		return light.Load() >= 16
	})
	pushTo("work", "heavy", 8, 2)
	pushTo("work", "next", 6, 2)
	for deadline := time.Now().Add(time.Minute); heavy.Load() < 4; refill() {
		if time.Now().After(deadline) {
			t.Fatalf("%d of 4 heavy entries ran in a minute, and %d light ones", heavy.Load(), light.Load())
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Logf("%d light entries ran beside 4 heavy ones", light.Load())
}

// TestTooHeavyEntryLeavesTheOtherLanesOfItsQueue has a limit lowered below the weight of an entry that waits in a lane of its own.
func TestTooHeavyEntryLeavesTheOtherLanesOfItsQueue(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{MaxWeight: 8, MaxConcurrent: 8})
	push(t, q, invalidation.Push{Flow: "heavy", Weight: 8, Payload: json.RawMessage("8")})
	if _, err := invalidation.Alter(t.Context(), pool, "work", map[string]any{"max_concurrent": 4}); err != nil {
		t.Fatal(err)
	}
	push(t, q, slices.Repeat([]invalidation.Push{{Flow: "light", Payload: json.RawMessage("1")}}, 100)...)
	var light atomic.Int64
	start(t, pool, tasknode.Config{Threads: 4}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) { light.Add(1); return nil, nil },
	})
	eventuallyTrue(t, "all light entries run", func() bool { return light.Load() >= 100 })
}
