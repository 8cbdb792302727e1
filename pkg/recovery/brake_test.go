package recovery_test

import (
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

// A disk that is nearly full refuses pushes and nothing else: entries that wait are run, callbacks are pushed, the doctor's
// rows name it, and pushes are taken again when there is room.
func TestTheBrakeRefusesPushesAndNoWork(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{})
	node := f.register(time.Minute)
	q := f.q
	var full atomic.Bool
	duty := recovery.NewSamples(f.pool, &term{db: f.pool}, recovery.Config{
		SamplePause: 20 * time.Millisecond,
		Brake: recovery.BrakeConfig{QueueEntriesMax: 40, Disk: func() (float64, error) {
			if full.Load() {
				return 0.97, nil
			}
			return 0.5, nil
		}},
	})
	run(t, duty)
	push := func(n int) error {
		pushes := make([]invalidation.Push, n)
		for i := range pushes {
			pushes[i].Payload = json.RawMessage(`{}`)
		}
		_, err := q.Push(t.Context(), pushes...)
		return err
	}
	until := func(contract, sql string) {
		t.Helper()
		eventually(t, contract, func() bool { return f.count(`SELECT (`+sql+`)::int`) == 1 })
	}
	keyed := func(key string) (id invalidation.EntryID, err error) {
		pushed, err := q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{}`), IdempotencyKey: key})
		if err != nil {
			return 0, err
		}
		return pushed[0].ID, nil
	}
	if err := push(1); err != nil {
		t.Fatal(err)
	}
	f.exec(`INSERT INTO penstock.uniqueness (queue_id, key, entry_id) VALUES ($1, 'ended', 0)`, q.ID) // its entry has ended
	once, err := keyed("once")
	if err != nil {
		t.Fatal(err)
	}
	full.Store(true)
	until("the brake is on", `EXISTS (SELECT FROM penstock.degradations() WHERE code = 'storage_full' AND critical AND detail LIKE '%97 % of the database''s disk%')`)
	if err := push(1); !errors.Is(err, invalidation.ErrQueueFull) || !strings.Contains(err.Error(), "97 % of the database's disk is in use") {
		t.Errorf("a push: %v", err)
	}
	if id, err := keyed("once"); err != nil || id != once {
		t.Errorf("a push that was accepted before is repeated: entry %d, %v; want %d", id, err, once)
	}
	if _, err := keyed("new"); !errors.Is(err, invalidation.ErrQueueFull) {
		t.Errorf("a push under a new key: %v", err)
	}
	const drawn = `SELECT last_value FROM penstock.entry_id_seq`
	before := f.count(drawn)
	mixed := []invalidation.Push{
		{Payload: json.RawMessage(`{}`), IdempotencyKey: "once"}, {Payload: json.RawMessage(`{}`), IdempotencyKey: "new"},
	}
	if _, err := q.Push(t.Context(), mixed...); !errors.Is(err, invalidation.ErrQueueFull) ||
		!strings.Contains(err.Error(), "refused whole") {
		t.Errorf("a push under a known and a new key: %v, want a refusal of the whole", err)
	}
	if after := f.count(drawn); after != before {
		t.Error("the push under a known and a new key drew ids before it was refused: it had begun to write")
	}
	active := invalidation.Push{Payload: json.RawMessage(`{}`), UniqueKey: "ended", UniquePolicy: invalidation.WhileActive}
	if _, err := q.Push(t.Context(), active); !errors.Is(err, invalidation.ErrQueueFull) {
		t.Errorf("a push under the unique key of an entry that has ended: %v", err)
	}
	if after := f.count(drawn); after != before {
		t.Error("the push under the unique key of an entry that has ended drew ids before it was refused")
	}
	if _, err := f.pool.Exec(t.Context(), `SELECT penstock.create_batch('b', 'work', '{"items": [1]}', 'test')`); err == nil {
		t.Error("a batch was taken")
	}
	if claimed := f.claim(node, 1); len(claimed) != 1 {
		t.Errorf("%d locks were claimed, want an entry that waits", len(claimed))
	}
	if _, err := f.pool.Exec(t.Context(), `SELECT penstock.push_many('webhook', ARRAY['{}'::jsonb], inside => true)`); err != nil {
		t.Errorf("a callback: %v", err)
	}
	full.Store(false)
	until("pushes are taken again", `NOT EXISTS (SELECT FROM penstock.queue WHERE refusal IS NOT NULL)`)
	if err := push(60); err != nil {
		t.Fatal(err)
	}
	until("the default capacity holds", `EXISTS (SELECT FROM penstock.degradations() WHERE code = 'queue_full' AND object = 'queue work')`)
	var refused *invalidation.FullError
	if err := push(1); !errors.As(err, &refused) || refused.Capacity != 40 || refused.Depth < 40 {
		t.Errorf("a push to a queue at the default capacity: %v", err)
	}
	if _, err := invalidation.Alter(t.Context(), f.pool, "work", map[string]any{"capacity": 1000}); err != nil {
		t.Fatal(err)
	}
	until("a capacity of its own counts", `NOT EXISTS (SELECT FROM penstock.queue WHERE refusal IS NOT NULL)`)
	if err := push(1); err != nil {
		t.Errorf("a queue with a capacity of its own: %v", err)
	}
}

// The brake of a full disk waited for a transaction that had locked one queue, and refused no push to any.
func TestTheBrakeWaitsForNoQueueThatIsLocked(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{})
	f.exec(`SELECT penstock.create_queue('other')`)
	letGo := f.hold(`SELECT FROM penstock.queue WHERE name = 'work' FOR UPDATE`)
	run(t, recovery.NewSamples(f.pool, bounded{&term{db: f.pool}}, recovery.Config{
		SamplePause: 20 * time.Millisecond,
		Brake:       recovery.BrakeConfig{Disk: func() (float64, error) { return 0.97, nil }},
	}))
	refused := func(queue string) bool {
		return f.count(`SELECT count(*) FROM penstock.queue WHERE name = $1 AND refusal IS NOT NULL`, queue) == 1
	}
	eventually(t, "pushes to the other queue are refused", func() bool { return refused("other") })
	letGo()
	eventually(t, "pushes to the queue that was locked are refused", func() bool { return refused("work") })
}
