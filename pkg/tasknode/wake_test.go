package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// shut is a gate that lets nothing through, and counts how often it was asked.
type shut struct{ asked atomic.Int64 }

func (g *shut) Take(string, int) (int, func(int)) {
	g.asked.Add(1)
	return 0, func(int) {}
}

// stay is a handler whose first run lasts until the test ends.
func stay(t *testing.T) invalidation.HandlerFunc {
	return func(ctx context.Context, _ *invalidation.Run) (json.RawMessage, error) {
		select {
		case <-ctx.Done():
		case <-t.Context().Done():
		}
		return nil, nil
	}
}

func TestALaneThatAGateRefusesIsNotAskedForAgainAndAgain(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	gate := &shut{}
	start(t, pool, tasknode.Config{Threads: 4, Gates: []tasknode.Gate{gate}}, map[string]invalidation.HandlerFunc{"work": fine})
	eventuallyTrue(t, "the gate was asked", func() bool { return gate.asked.Load() > 0 })
	before, began := gate.asked.Load(), time.Now()
	time.Sleep(time.Second)
	n := gate.asked.Load() - before
	if passed := time.Since(began); float64(n) > 20*passed.Seconds() {
		t.Errorf("asked %d times within %s", n, passed)
	}
}

func TestAQueueAtItsLimitIsNotClaimedFromAgainAndAgain(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{MaxConcurrent: 1})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)}, invalidation.Push{Payload: json.RawMessage(`2`)})
	n, _ := start(t, pool, tasknode.Config{Threads: 4, Grace: time.Millisecond}, map[string]invalidation.HandlerFunc{"work": stay(t)})
	eventually(t, pool, "one runs", `SELECT EXISTS (SELECT FROM penstock.lock)`)
	before, began := n.Stats().Claims.Load(), time.Now()
	time.Sleep(time.Second)
	claims := n.Stats().Claims.Load() - before
	if passed := time.Since(began); float64(claims) > 30*passed.Seconds() {
		t.Errorf("%d claims within %s, although the limit leaves no room", claims, passed)
	}
}

// Another claimer is in the lane for a moment: nothing else wakes the node then, and the poll is far away.
func TestALaneThatSomebodyElseWasInIsTriedAgainSoon(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	n, _ := start(t, pool, tasknode.Config{Threads: 4, Poll: time.Hour}, map[string]invalidation.HandlerFunc{"work": fine})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	n.Wake(q.ID, nil)
	eventually(t, pool, "one ran", `SELECT EXISTS (SELECT FROM penstock.result)`)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background()) // a pool that is closed waits for it
	const lane = `SELECT pg_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' 1 ', 0))`
	if _, err := tx.Exec(t.Context(), lane, q.ID); err != nil {
		t.Fatal(err)
	}
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	claims := n.Stats().Claims.Load()
	n.Wake(q.ID, &invalidation.Lane{Priority: 1})
	eventuallyTrue(t, "a claim came too early", func() bool { return n.Stats().Claims.Load() > claims })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, pool, "the other ran", emptySQL)
}

// A lane that waits for a rate, or for the end of a throttle, rests for a minute: a change of either ends that rest.
func TestARaisedRateAndALiftedThrottleTakeEffectWithTheNextHeartbeat(t *testing.T) {
	for name, orders := range map[string]struct{ before, wait, end string }{
		"rate": {
			`SELECT penstock.set_limit('slow', '{"rate": 0.001, "burst": 1}'), penstock.use_limit('work', 'slow')`,
			`SELECT EXISTS (SELECT FROM penstock.result)`,
			`SELECT penstock.set_limit('slow', '{"rate": 1000, "burst": 1000}')`,
		},
		"throttle": {
			`SELECT penstock.throttle('work', '1 hour')`, `SELECT true`,
			`SELECT penstock.lift_throttle('work')`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := open(t)
			q := create(t, pool, "work", invalidation.Config{})
			if _, err := pool.Exec(t.Context(), orders.before); err != nil {
				t.Fatal(err)
			}
			config := tasknode.Config{Threads: 4, Beat: time.Second, Poll: 20 * time.Millisecond}
			n, _ := start(t, pool, config, map[string]invalidation.HandlerFunc{"work": fine})
			push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)}, invalidation.Push{Payload: json.RawMessage(`2`)})
			eventually(t, pool, "the rate lets one through", orders.wait)
			claims := n.Stats().Claims.Load()
			eventuallyTrue(t, "the lane was tried", func() bool { return n.Stats().Claims.Load() > claims || claims > 1 })
			time.Sleep(1500 * time.Millisecond) // the node has read the queue, and its lane rests
			began := time.Now()
			if _, err := pool.Exec(t.Context(), orders.end); err != nil {
				t.Fatal(err)
			}
			eventually(t, pool, "all ran", emptySQL)
			if passed := time.Since(began); passed > 20*time.Second {
				t.Errorf("it took %s", passed)
			}
		})
	}
}

// Explain names why the nodes of a queue refuse it, where all of them do.
func TestExplainNamesWhatTheNodesLack(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	status := func() map[string]any {
		return map[string]any{"governor": map[string]any{"refused": map[string]string{"work": "memory: an entry needs 64.0 GiB"}}}
	}
	config := tasknode.Config{Name: "small", Threads: 4, Beat: time.Second, Gates: []tasknode.Gate{&shut{}}, Status: status}
	start(t, pool, config, map[string]invalidation.HandlerFunc{"work": fine})
	id := push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})[0].ID
	const why = `SELECT penstock.explain_entry($1)->'reasons' @> '[{"code": "no_resources"}]'
	             AND penstock.explain_entry($1)::text LIKE '%small: memory: an entry needs 64.0 GiB%'`
	eventually(t, pool, "the reasons name the memory", why, id)
	_, err := pool.Exec(t.Context(), `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids)
	    SELECT 99, 'large', application, lease, threads, queue_ids FROM penstock.node LIMIT 1`)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, pool, "another node has the memory", `SELECT NOT (`+why+`)`, id)
}

// A worker that takes no call leaves no attempt, no error and no log: the reasons have its answer.
func TestExplainNamesWhyEntriesAreHandedBack(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	refuse := func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		return nil, invalidation.NoCapacity(time.Hour, errors.New("worker answered 503: no GPU\x00 left"))
	}
	config := tasknode.Config{Name: "small", Threads: 4, Beat: time.Second}
	start(t, pool, config, map[string]invalidation.HandlerFunc{"work": refuse})
	id := push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})[0].ID
	const why = `SELECT penstock.explain_entry($1)->'reasons' @> jsonb_build_array(jsonb_build_object('code', 'handed_back',
	                 'numbers', jsonb_build_object('node', 'small', 'entry_id', $1::bigint)))
	             AND penstock.explain_entry($1)::text LIKE '%node small handed entry ' || $1 || ' back %: worker answered 503: no GPU? left%'`
	eventually(t, pool, "the reasons have the worker's answer", why, id)
}

// What a refused claim gave back must not keep others waiting: here a gate refuses one queue and lets the other pass.
func TestALaneThatIsRefusedDoesNotHoldUpOthers(t *testing.T) {
	pool := open(t)
	shutQueue, openQueue := create(t, pool, "shut", invalidation.Config{MaxConcurrent: 1}), create(t, pool, "work", invalidation.Config{})
	n, _ := start(t, pool, tasknode.Config{Threads: 4, SchedulingThreads: 1, Poll: time.Hour, Grace: time.Millisecond, Ranker: lowestQueueFirst{}},
		map[string]invalidation.HandlerFunc{"shut": stay(t), "work": fine})
	one := invalidation.Push{Payload: json.RawMessage(`1`)}
	push(t, shutQueue, one, one)
	n.Wake(shutQueue.ID, nil)
	eventually(t, pool, "one runs", `SELECT EXISTS (SELECT FROM penstock.lock)`)
	for range 5 {
		push(t, openQueue, one)
		n.Wake(openQueue.ID, &invalidation.Lane{Priority: 1})
		eventually(t, pool, "the other queue is served", `SELECT NOT EXISTS (SELECT FROM penstock.entry_work)`)
	}
}

type lowestQueueFirst struct{}

func (lowestQueueFirst) Next(dst []int, lanes []*fairness.Candidate, _ int, _ bool) []int {
	best := -1
	for i, l := range lanes {
		if !l.Taken && (best < 0 || l.Queue.ID < lanes[best].Queue.ID) {
			best = i
		}
	}
	if best >= 0 {
		dst = append(dst, best)
	}
	return dst
}
func (lowestQueueFirst) Charge(fairness.Candidate, float64)           {}
func (lowestQueueFirst) Extend(fairness.Candidate, float64)           {}
func (lowestQueueFirst) Correct(fairness.Candidate, float64, float64) {}

func eventuallyTrue(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
