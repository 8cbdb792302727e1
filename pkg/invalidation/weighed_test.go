package invalidation

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// weighedBed has the queue work under limit gpu of so many units, whose entries may weigh as much.
func weighedBed(t *testing.T, most int, c Config) *bed {
	t.Helper()
	c.MaxWeight = most
	b := newBed(t, c)
	b.q = b.under("gpu", limitOptions{MaxUnits: &most}, map[string]int{"work": 1})["work"]
	b.keepUnits()
	return b
}

// keepUnits has units kept for lanes that wait until a test says otherwise, instead of for three seconds.
func (b *bed) keepUnits() {
	b.Helper()
	for _, function := range []string{"penstock.await_units", "penstock.kept_units"} {
		pgtest.Redefine(b, b.pool, function, "interval '3 seconds'", "interval '1 hour'")
	}
}

func weights(ws ...int32) []Push {
	pushes := make([]Push, len(ws))
	for i, w := range ws {
		pushes[i].Weight = w
	}
	return pushes
}

// inLane claims from the lane of a flow.
func (b *bed) inLane(q *Queue, flow string, limit int) Claimed {
	b.Helper()
	before := b.q
	b.q = q
	defer func() { b.q = before }()
	return b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1, Flow: flow}, Limit: limit})
}

// unitsHeld is the weights of all locks.
func (b *bed) unitsHeld() int {
	b.Helper()
	return b.count(`SELECT coalesce(sum(weight), 0) FROM penstock.lock`)
}

func (b *bed) done(locks ...*Lock) {
	b.Helper()
	for _, l := range locks {
		for i, e := range l.Entries {
			ending := Done(l, e.ID, nil, 0)
			ending.Last = i == len(l.Entries)-1
			b.settle(ending)
		}
	}
}

func TestClaimTakesTheEntriesWhoseWeightsFit(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	ids := b.pushAll(b.pool, weights(3, 0, 3, 2, 1)...)
	first := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10})
	b.want(entryIDs(first.Locks...), ids[:3])
	b.want(b.unitsHeld(), 7)
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}); len(c.Locks) != 0 || !c.Limited || !c.QueueWide {
		t.Errorf("a weight of 2 beside one free unit: %d locks, limited %v, queue-wide %v; the 1 behind it must wait", len(c.Locks), c.Limited, c.QueueWide)
	}
	b.done(first.Locks[1])
	b.want(entryIDs(b.claim(10)...), ids[3:4])
	b.done(first.Locks[0])
	b.want(entryIDs(b.claim(10)...), ids[4:])
}

func TestLockOfAGroupWeighsAsItsHeaviestEntry(t *testing.T) {
	b := weighedBed(t, 8, Config{QuantumCount: 3})
	ids := b.pushAll(b.pool, Push{LockKey: "a", Weight: 2}, Push{LockKey: "a", Weight: 5}, Push{LockKey: "a"}, Push{LockKey: "a", Weight: 8},
		Push{LockKey: "b", Weight: 4}, Push{LockKey: "b"}, Push{Weight: 3})
	locks := b.claim(10)
	b.want(entryIDs(locks...), ids[:3])
	b.want(b.unitsHeld(), 5)
	b.done(locks...)
	next := b.claim(10) // a goes to the end of its lane, behind b and the solo entry
	b.want(b.unitsHeld(), 7)
	b.want(len(next), 2)
	b.done(next...)
	b.want(entryIDs(b.claim(10)...), ids[3:4])
	b.want(b.unitsHeld(), 8)
}

// TestHeavierEntryEndsTheCoverOfItsLock has an entry with a lower id commit between the claim of its key and the read.
func TestHeavierEntryEndsTheCoverOfItsLock(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	early, err := b.pool.Begin(b.ctx)
	b.must(err)
	defer early.Rollback(b.ctx)
	first := b.pushAll(early, Push{LockKey: "a", Weight: 8})
	later := b.pushAll(b.pool, Push{LockKey: "a"}, Push{LockKey: "a"})
	tx, err := b.pool.Begin(b.ctx)
	b.must(err)
	defer tx.Rollback(b.ctx)
	sql, args := b.q.lockFirst(LanesRequest{Node: here, ClaimID: 1, Limit: 10, Lanes: []ClaimLane{{Lane: usual}}})
	b.exec(tx, sql, args...)
	b.must(early.Commit(b.ctx))
	b.must(tx.Commit(b.ctx))
	found, err := b.q.Reclaim(b.ctx, here, 1)
	b.must(err)
	b.want(len(found.Locks), 0) // the key was released, since its first entry is heavier than the lock
	b.want(found.Requeued, []LaneHead{{Lane: usual, Position: int64(later[0])}})
	b.want(entryIDs(b.claim(10)...), append(first, later...))
	b.want(b.unitsHeld(), 8)
}

func TestWeightOutlivesRetryAndFailure(t *testing.T) {
	b := weighedBed(t, 4, Config{})
	id := b.pushAll(b.pool, weights(3)...)[0]
	b.settle(last(Retry(b.claim(1)[0], id, Failure{Class: "x", Error: "once"}, 0, 0)))
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = now() - interval '1 second' WHERE status = 'initial'`)
	_, err := b.q.Promote(b.ctx, 10)
	b.must(err)
	lock := b.claim(1)[0]
	b.want(b.unitsHeld(), 3)
	b.settle(last(Fail(lock, id, Failure{Class: "x", Error: "for good"}, 0)))
	b.want(b.count(`SELECT weight FROM penstock.failure`), 3)
	b.exec(b.pool, `SELECT penstock.retry_failure($1)`, id)
	b.want(len(b.claim(1)), 1)
	b.want(b.unitsHeld(), 3)
}

func TestWeightThatCannotBeIsRefused(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 6})
	four := 4
	b.q = b.under("gpu", limitOptions{MaxUnits: &four}, map[string]int{"work": 2})["work"]
	for want, call := range map[string]string{
		"weight 0 is not at least 1 (entry 1)":                                               `penstock.push('work', '1', weight => 0)`,
		"weight 7 is above max_weight 6 of queue \"work\" (entry 2)":                         `penstock.push_json('work', '[{"payload": 1}, {"payload": 1, "weight": 7}]')`,
		"weight 3 is more than limit \"gpu\" ever lets through: 6 of 4 units (entry 1)":      `penstock.push_many('work', ARRAY['1']::jsonb[], weights => '{3}')`,
		"weights has 2 elements, and there are 1 payloads":                                   `penstock.push_many('work', ARRAY['1']::jsonb[], weights => '{1,1}')`,
		"setting of queue \"work\" is not valid: max_weight is not from 1 to 1000; 1 is for": `penstock.alter_queue('work', '{"max_weight": 1001}')`,
	} {
		_, err := b.pool.Exec(b.ctx, `SELECT `+call)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s ended with %v, want %s", call, err, want)
		}
	}
	b.pushAll(b.pool, weights(1, 2)...)
}

// TestLimitTakenOnLaterCountsWeights has heavy entries run in a queue without limits.
func TestLimitTakenOnLaterCountsWeights(t *testing.T) {
	for _, keyed := range []bool{false, true} {
		b := newBed(t, Config{MaxWeight: 8})
		pushes := weights(5, 2, 2)
		if keyed {
			for i := range pushes {
				pushes[i].LockKey = string(rune('a' + i))
			}
		}
		b.pushAll(b.pool, pushes...)
		b.want(len(b.claim(2)), 2)
		eight := 8
		b.q = b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1})["work"]
		if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1}); len(c.Locks) != 0 || !c.Limited {
			t.Errorf("keyed %v: %d locks beside 7 of 8 units, limited %v", keyed, len(c.Locks), c.Limited)
		}
	}
}

// TestClaimThatKnowsNoWeightsIsRefused uses a handle from before the queue took weights.
func TestClaimThatKnowsNoWeightsIsRefused(t *testing.T) {
	b := newBed(t, Config{MaxConcurrent: 4})
	old := b.q
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_weight": 4})
	b.must(err)
	b.pushAll(b.pool, weights(4, 4)...)
	if c := b.inLane(old, "", 2); len(c.Locks) != 0 || !c.TryLater {
		t.Errorf("an old handle got %d locks, contended %v", len(c.Locks), c.TryLater)
	}
	fresh, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_weight": 1}) // for later pushes
	b.must(err)
	b.want(len(b.inLane(fresh, "", 2).Locks), 1)
	b.want(b.unitsHeld(), 4)
}

func TestRatesCountEntriesNotWeights(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 10})
	most := 20
	b.q = b.under("gpu", limitOptions{MaxUnits: &most, Rate: 0.001, Burst: 3}, map[string]int{"work": 1})["work"]
	b.pushAll(b.pool, weights(6, 6, 1, 1)...)
	c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10})
	b.want(len(c.Locks), 3)
	b.want(b.unitsHeld(), 13)
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}); !c.Limited || c.Wait < time.Minute {
		t.Errorf("limited %v, wait %v; the bucket is empty", c.Limited, c.Wait)
	}
}

// TestUnitsAreKeptForTheLaneThatWaitsLongest has a heavy entry wait beside lanes of light ones, of its queue and of
// another.
func TestUnitsAreKeptForTheLaneThatWaitsLongest(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 8})
	eight := 8
	_, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	q := b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1, "other": 1})
	work, other := q["work"], q["other"]
	b.keepUnits()
	b.must(pushFlow(b.ctx, work, 20, "light"))
	b.must(pushFlow(b.ctx, other, 20, ""))
	b.q = work
	b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8}, Push{Flow: "heavy", Weight: 8})
	running := append(b.inLane(work, "light", 3).Locks, b.inLane(other, "", 3).Locks...)
	b.want(b.unitsHeld(), 6)
	b.want(len(b.inLane(work, "heavy", 1).Locks), 0)
	for _, c := range []Claimed{b.inLane(work, "light", 1), b.inLane(other, "", 1)} {
		if len(c.Locks) != 0 || !c.Limited {
			t.Errorf("%d locks while 2 free units are kept, limited %v", len(c.Locks), c.Limited)
		}
	}
	var why json.RawMessage
	b.must(b.pool.QueryRow(b.ctx, `SELECT jsonb_agg(x.r) FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
	    CROSS JOIN LATERAL penstock.limit_reasons(q, e) x(r) WHERE e.queue_id = $1 AND e.status = 'pending'`, other.ID).Scan(&why))
	if !strings.Contains(string(why), "are kept for lanes that wait longer") {
		t.Errorf("the reasons do not name the units that are kept: %s", why)
	}
	for _, l := range running[:3] {
		b.done(l)
	}
	b.q = other
	b.done(running[3:]...)
	heavy := b.inLane(work, "heavy", 1).Locks
	b.want(len(heavy), 1)
	b.want(len(b.inLane(work, "light", 9).Locks), 0)
	b.want(len(b.inLane(work, "heavy", 1).Locks), 0) // the next one waits behind the light lanes
	b.q = work
	b.done(heavy...)
	b.want(len(b.inLane(other, "", 9).Locks), 8-1) // a unit is kept for the light lane, which came before
	b.want(len(b.inLane(work, "light", 9).Locks), 1)
}

// TestUnitsAreNotKeptForALaneThatIsNotTried has a lane wait, and no claim come back to it.
func TestUnitsAreNotKeptForALaneThatIsNotTried(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	b.must(pushFlow(b.ctx, b.q, 20, "light"))
	b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8})
	b.want(len(b.inLane(b.q, "light", 1).Locks), 1)
	b.want(len(b.inLane(b.q, "heavy", 1).Locks), 0)
	b.want(len(b.inLane(b.q, "light", 1).Locks), 0)
	b.exec(b.pool, `UPDATE penstock.limit_wait SET until = clock_timestamp() WHERE flow = 'heavy'`)
	b.want(len(b.inLane(b.q, "light", 1).Locks), 1)
}

// TestEntryThatFitsNoMoreKeepsNothing lowers a limit below the weight of an entry that waits.
func TestEntryThatFitsNoMoreKeepsNothing(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	b.must(pushFlow(b.ctx, b.q, 20, "light"))
	b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8})
	four := 4
	b.must(setLimit(b.ctx, b.pool, "gpu", limitOptions{MaxUnits: &four}))
	b.want(len(b.inLane(b.q, "heavy", 1).Locks), 0)
	b.want(len(b.inLane(b.q, "light", 9).Locks), 4)
}

// TestWeightsCountHoweverTheyWereAllowed sets max_weight of a queue, which a node has open, and of a new one by SQL.
func TestWeightsCountHoweverTheyWereAllowed(t *testing.T) {
	b := newBed(t, Config{})
	eight := 8
	b.q = b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1})["work"]
	const versionSQL = `SELECT version FROM penstock.queue WHERE name = 'work'`
	before := b.count(versionSQL)
	b.exec(b.pool, `UPDATE penstock.queue SET max_weight = 8 WHERE name = 'work'`)
	b.want(b.count(versionSQL), before+1) // nodes read the queue again
	b.pushAll(b.pool, weights(5, 5, 5)...)
	claimed := func() int {
		c, err := b.q.Claim(b.ctx, ClaimRequest{Node: here, Lane: usual, Limit: 10})
		b.must(err)
		return len(c.Locks)
	}
	b.want(claimed(), 0) // the queue is stale
	var err error
	b.q, err = Open(b.ctx, b.pool, "work")
	b.must(err)
	b.want(claimed(), 1)
	b.want(claimed(), 0)
	b.want(b.unitsHeld(), 5)
	b.exec(b.pool, `UPDATE penstock.queue SET max_weight = 1 WHERE name = 'work'`)
	b.want(b.count(`SELECT count(*) FROM penstock.queue q JOIN penstock.limit_use u ON u.queue_id = q.id WHERE q.weighed AND u.weighed`), 1)
	b.exec(b.pool, `INSERT INTO penstock.queue (name, max_weight) VALUES ('other', 2), ('light', 1)`)
	b.want(b.count(`SELECT count(*) FROM penstock.queue WHERE name = 'other' AND weighed`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.queue WHERE name = 'light' AND weighed`), 0)
}
