package maintenance_test

import (
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
)

// brake runs the brake until the test ends.
func (f *fleet) brake(cfg maintenance.BrakeConfig, latest func() maintenance.Sampling) {
	f.t.Helper()
	run(f.t, maintenance.NewBrake(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: 10 * time.Millisecond, BrakePause: 20 * time.Millisecond, SamplePause: 20 * time.Millisecond,
		GiveUp: time.Millisecond, Brake: cfg,
	}, latest))
}

// noSampling is the newest sampling where none has ended yet.
func noSampling() maintenance.Sampling { return maintenance.Sampling{} }

// A disk that is nearly full refuses pushes and nothing else: entries that wait are run, callbacks are pushed, the doctor's
// rows name it, and pushes are taken again when there is room.
func TestTheBrakeRefusesPushesAndNoWork(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(time.Minute)
	q := f.q
	var full atomic.Bool
	f.brake(maintenance.BrakeConfig{QueueEntriesMax: 40, Disk: func() (float64, error) {
		if full.Load() {
			return 0.97, nil
		}
		return 0.5, nil
	}}, sampler(t, f).Latest)
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
	if claimed := f.claim(node); len(claimed) != 1 {
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
	if err := push(1); !errors.As(err, &refused) || refused.Capacity != 40 || refused.Depth < 38 {
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
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('other')`)
	letGo := f.hold(`SELECT FROM penstock.queue WHERE name = 'work' FOR UPDATE`)
	run(t, maintenance.NewBrake(f.pool, bounded{&term{db: f.pool}}, maintenance.Config{
		BrakePause: 20 * time.Millisecond,
		Brake:      maintenance.BrakeConfig{Disk: func() (float64, error) { return 0.97, nil }},
	}, noSampling))
	refused := func(queue string) bool {
		return f.count(`SELECT count(*) FROM penstock.queue WHERE name = $1 AND refusal IS NOT NULL`, queue) == 1
	}
	eventually(t, "pushes to the other queue are refused", func() bool { return refused("other") })
	letGo()
	eventually(t, "pushes to the queue that was locked are refused", func() bool { return refused("work") })
}

// The brake went by the samples at the end of each sampling: one that hung or failed kept it from acting, and one that
// took six seconds made it act once a minute.
func TestTheBrakeActsWhileSamplingHangs(t *testing.T) {
	f := newUsualFleet(t)
	f.hold(`LOCK TABLE penstock.sample`)
	const refusals = `SELECT count(*) FROM penstock.queue WHERE refusal IS NOT NULL`
	var full atomic.Bool
	full.Store(true)
	f.brake(maintenance.BrakeConfig{Disk: func() (float64, error) {
		if full.Load() {
			return 0.97, nil
		}
		return 0.5, nil
	}}, sampler(t, f).Latest)
	eventually(t, "pushes are refused while the disk is full", func() bool { return f.count(refusals) > 0 })
	full.Store(false)
	eventually(t, "pushes are taken while the disk has room", func() bool { return f.count(refusals) == 0 })
}

// A queue that was refused at its last sample is taken again once it has room, although no sample follows, and the old
// sample does not refuse it once more. Before, a leader whose sampling fails had never taken it again.
func TestAQueueIsTakenAgainWithoutASample(t *testing.T) {
	f := newUsualFleet(t)
	const refused = `SELECT count(*) FROM penstock.queue WHERE refusal->>'reason' = 'depth'`
	var asked atomic.Int64
	f.push(60, "")
	at := time.Now()
	f.brake(maintenance.BrakeConfig{QueueEntriesMax: 40}, func() maintenance.Sampling {
		asked.Add(1)
		return maintenance.Sampling{At: at, Queues: []maintenance.Sample{{QueueID: f.q.ID, Pending: 60, Read: at}}}
	})
	eventually(t, "the full queue is refused", func() bool { return f.count(refused) == 1 })
	passes := func(n int64) {
		t.Helper()
		until := asked.Load() + n
		eventually(t, "the brake makes passes", func() bool { return asked.Load() >= until })
	}
	passes(5)
	if f.count(refused) != 1 {
		t.Error("the full queue is taken again")
	}
	f.exec(`SELECT penstock.cancel_entry(id) FROM penstock.entry`)
	eventually(t, "the queue with room is taken again", func() bool { return f.count(refused) == 0 })
	passes(5)
	if f.count(refused) != 0 {
		t.Error("the old sample refused the queue once more")
	}
}

// A leader whose samplings never end bounds its queues nevertheless.
func TestAQueueWithoutSamplesGetsTheDefaultCapacity(t *testing.T) {
	f := newUsualFleet(t)
	f.push(60, "")
	f.brake(maintenance.BrakeConfig{QueueEntriesMax: 40}, noSampling)
	eventually(t, "the full queue is refused", func() bool {
		return f.count(`SELECT count(*) FROM penstock.queue WHERE refusal->>'reason' = 'depth'`) == 1
	})
}

// While the use of the disk cannot be read, a full disk stays full and the term goes on: such an error had ended it.
func TestADiskThatCannotBeMeasuredEndsNothing(t *testing.T) {
	f := newUsualFleet(t)
	const refused = `SELECT count(*) FROM penstock.queue WHERE refusal->>'reason' = 'storage'`
	var measured atomic.Int64 // percent; less than 0: it fails
	var failed atomic.Int64
	measured.Store(97)
	f.brake(maintenance.BrakeConfig{Disk: func() (float64, error) {
		share := measured.Load()
		if share < 0 {
			failed.Add(1)
			return 0, errors.New("no such path")
		}
		return float64(share) / 100, nil
	}}, noSampling)
	eventually(t, "the full disk refuses pushes", func() bool { return f.count(refused) > 0 })
	measured.Store(-1)
	eventually(t, "the brake goes on while the disk is not known", func() bool { return failed.Load() > 5 })
	if f.count(refused) == 0 {
		t.Error("pushes are taken while it is not known whether the disk is full")
	}
	measured.Store(50)
	eventually(t, "the disk with room takes pushes", func() bool { return f.count(refused) == 0 })
}
