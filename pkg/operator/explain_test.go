package operator_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func TestExplainNamesEachConditionOfTheClaim(t *testing.T) {
	b := newQueueBed(t, Config{MaxConcurrent: 1, MaxConcurrentPerNode: 1})
	first := b.push("", "", "K", "K", "K")
	b.want(b.reasons(first[0]), []string{})
	b.want(b.reasons(first[1]), []string{"ahead_in_lane"})
	b.want(b.reasons(first[4]), []string{"ahead_in_key", "ahead_in_lane"})
	lock := b.claimOne()
	b.want(b.reasons(first[0]), []string{"running"})
	b.want(b.reasons(first[1]), []string{"limit"})
	b.settle(doneAll(lock)...)
	b.want(b.reasons(first[0]), []string{"ended"})

	later := b.pushAll(b.pool, Push{DueAt: time.Now().Add(4 * time.Minute)})[0]
	b.want(b.reasons(later), []string{"not_due"})
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = now() WHERE id = $1`, later)
	b.want(b.reasons(later), []string{"promotion_late"})

	b.must(b.do(operator.DisableEntry, first[1], ann))
	b.want(b.reasons(first[1]), []string{"disabled"})
	b.did(b.d.Do(b.ctx, operator.PauseQueue, "work", ann, time.Now().Add(time.Hour)))
	b.must(b.do(operator.DisableQueue, "work", ann))
	b.exec(b.pool, `UPDATE penstock.node SET draining_at = now()`)
	b.want(b.reasons(first[2]), []string{"no_node", "paused", "queue_disabled"})
}

// Nothing else shows an operator which transaction keeps the keys of a queue from being claimed.
func TestExplainNamesATransactionThatPushedADuplicate(t *testing.T) {
	b := newQueueBed(t, Config{})
	p := Push{UniqueKey: "u", UniquePolicy: WhileQueued, LockKey: "K"}
	id := b.pushAll(b.pool, p)[0]
	other := b.push("other")[0]
	for shared, keys := range map[string]string{"0": "lock key K", "256": "the lock keys of the queue"} {
		tx := b.begin()
		b.exec(tx, `SELECT set_config('penstock.keys_shared', $1, true)`, shared)
		b.want(b.pushAll(tx, p)[0], id)
		x, err := b.d.Explain(b.ctx, int64(id))
		b.must(err)
		if len(x.Reasons) != 1 || x.Reasons[0].Code != "key_pushed" || !strings.Contains(x.Reasons[0].Text, keys) ||
			x.Reasons[0].Numbers["pid"] != float64(tx.Conn().PgConn().PID()) {
			t.Errorf("with %s keys shared: %+v, want key_pushed of %s by session %d", shared, x.Reasons, keys, tx.Conn().PgConn().PID())
		}
		want := []string{"ahead_in_lane"}
		if shared == "256" {
			want = []string{"ahead_in_lane", "key_pushed"}
		}
		b.want(b.reasons(other), want)
		b.must(tx.Rollback(b.ctx))
		b.want(b.reasons(id), []string{})
	}
}

func TestExplainSaysWhoHoldsTheKeyAndForHowLong(t *testing.T) {
	b := newQueueBed(t, Config{})
	holder := b.push("K")[0]
	lock := b.claimOne()
	behind := b.push("K")[0]
	b.exec(b.pool, `UPDATE penstock.lock SET claimed_at = clock_timestamp() - interval '2 hours 3 minutes'`)
	e, err := b.d.Explain(b.ctx, int64(behind))
	b.must(err)
	held := e.Reasons[0]
	b.want([]any{e.State, held.Code, held.Numbers["entry_id"], held.Numbers["node"], held.Numbers["token"]},
		[]any{"pending", "key_held", holder, "here", lock.Token})
	if want := "is held by entry 1 on node here for 2 h 3 m"; !strings.Contains(held.Text, want) {
		t.Errorf("text is %q, want it to say %q", held.Text, want)
	}
}

func TestExplainSaysWhatNodesOfTheQueueDo(t *testing.T) {
	b := newQueueBed(t, Config{MaxConcurrentPerNode: 1})
	b.push("", "")
	b.claim(1)
	b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 1})
	id := b.push("")[0]
	b.want(b.reasons(id), []string{"node_limit"})
	b.exec(b.pool, `UPDATE penstock.node SET beat_at = now() - interval '2 hours'`)
	b.want(b.reasons(id), []string{"no_node"})
	if e, err := b.d.Explain(b.ctx, int64(id)); err != nil || !strings.Contains(e.Reasons[0].Text, "2 that did fell silent") {
		t.Errorf("explanation is %+v (%v)", e, err)
	}
}

// Nodes of the application live, and none has a handler: that is another thing to mend than a missing node.
func TestExplainSaysWhatAQueueWithoutAHandlerNeeds(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.push("")[0]
	b.exec(b.pool, `UPDATE penstock.node SET queue_ids = '{}'`)
	e, err := b.d.Explain(b.ctx, int64(id))
	b.must(err)
	want := "2 of application default live and have no handler for it, since a queue of kind task needs statements"
	if len(e.Reasons) != 1 || e.Reasons[0].Code != "no_node" || !strings.Contains(e.Reasons[0].Text, want) {
		t.Errorf("explained %+v, want that %s", e.Reasons, want)
	}
	b.exec(b.pool, `UPDATE penstock.node SET application = 'other'`)
	e, err = b.d.Explain(b.ctx, int64(id))
	b.must(err)
	if want := "no live node serves the queue (application default)"; len(e.Reasons) != 1 || e.Reasons[0].Text != want {
		t.Errorf("explained %+v, want %q", e.Reasons, want)
	}
}

func TestExplainOfALateEntrySaysThatItExpires(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.pushAll(b.pool, Push{StartBy: time.Now().Add(time.Hour)})[0]
	b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() - interval '1 minute'`)
	b.want(b.reasons(id), []string{"expired"})
	if _, err := b.d.Explain(b.ctx, int64(id+1000)); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("explanation of an unknown entry: %v", err)
	}
}

func TestExplainNamesWhatIsShared(t *testing.T) {
	b := newQueueBed(t, Config{Model: "m"})
	b.push("")
	b.claim(1)
	id := b.push("")[0]
	b.want(b.reasons(id), []string{"no_instance"})
	b.exec(b.pool, `UPDATE penstock.queue SET model = NULL`)
	b.want(b.reasons(id), []string{})
	b.exec(b.pool, `UPDATE penstock.node SET threads = 1 WHERE id = $1`, here)
	b.want(b.reasons(id), []string{}) // the other node has no bound
	b.exec(b.pool, `UPDATE penstock.node SET queue_ids = '{}' WHERE id = $1`, there)
	b.want(b.reasons(id), []string{"no_thread"})
	b.exec(b.pool, `UPDATE penstock.node SET threads = 2 WHERE id = $1`, here)
	b.exec(b.pool, `SELECT penstock.set_limit('disk', '{"max_units": 1}'), penstock.use_limit('work', 'disk')`)
	b.want(b.reasons(id), []string{"limit"})
	b.exec(b.pool, `SELECT penstock.set_limit('disk', '{"max_units": 2, "rate": 0.01, "burst": 1}')`)
	b.exec(b.pool, `INSERT INTO penstock.bucket (limit_id, flow, units, at)
	                SELECT id, '', 0, clock_timestamp() FROM penstock."limit" WHERE name = 'disk'`)
	b.want(b.reasons(id), []string{"rate"})
	b.exec(b.pool, `SELECT penstock.throttle('work', '1 minute', reason => '429')`)
	b.want(b.reasons(id), []string{"rate", "throttled"})
}

// A lock that needs more units than the bucket of a rate holds never starts: it is refused, and named where it is there.
func TestUnitsBeyondTheBurstOfARateAreRefusedAndExplained(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.push("")[0]
	refused := func(sql string) {
		t.Helper()
		if _, err := b.pool.Exec(b.ctx, sql); postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "burst") {
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
	refused(`SELECT penstock.set_limit('disk', '{"rate": 1, "burst": 0.5}')`)
	b.exec(b.pool, `SELECT penstock.set_limit('disk', '{"rate": 1, "burst": 3}')`)
	refused(`SELECT penstock.use_limit('work', 'disk', 5)`)
	b.exec(b.pool, `SELECT penstock.use_limit('work', 'disk', 3)`)
	refused(`SELECT penstock.set_limit('disk', '{"burst": 2}')`)
	b.exec(b.pool, `UPDATE penstock."limit" SET burst = 2`)
	var why string
	b.must(b.pool.QueryRow(b.ctx, `SELECT penstock.explain_entry($1)::text`, id).Scan(&why))
	if !strings.Contains(why, "the entry needs 3, more than its burst of 2: it never starts") {
		t.Errorf("explained as %s", why)
	}
	b.exec(b.pool, `SELECT penstock.set_limit('disk', '{"max_units": 0}')`) // a way to stop, which never fits
}

func TestExplainNamesUntilWhenAnEntryIsHeldBack(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.pushAll(b.pool, Push{}, Push{LockKey: "K", Flow: "f"})
	b.exec(b.pool, `UPDATE penstock.ready SET not_before = now() + interval '1 minute'`)
	for _, id := range ids {
		b.want(b.reasons(id), []string{"delayed"})
	}
	b.exec(b.pool, `UPDATE penstock.ready SET not_before = now() + interval '500 milliseconds'`)
	var late bool // for all reasons: they hold at the begin of the statement
	b.must(b.pool.QueryRow(b.ctx, `WITH late AS MATERIALIZED (SELECT pg_sleep(0.6))
		SELECT penstock.explain_entry($1)::text LIKE '%in -%' FROM late`, ids[0]).Scan(&late))
	if late {
		t.Error("it is delayed for less than no time")
	}
	b.exec(b.pool, `UPDATE penstock.ready SET not_before = now() - interval '1 minute'`)
	for _, id := range ids {
		b.want(b.reasons(id), []string{})
	}
}

func TestQueueStatusCountsStoredAndComputedStates(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push("", "", "K", "K", "", "")
	b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)}, Push{DueAt: time.Now().Add(time.Hour)})
	b.claim(1)
	b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 1, From: int64(ids[2])})
	b.push("K")
	b.must(b.do(operator.DisableEntry, ids[4], ann))
	failed := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1, From: int64(ids[5])}).Locks[0]
	b.settle(last(Fail(failed, ids[5], Failure{Error: "boom"}, 0)))
	var s [6]int
	var estimated bool
	b.must(b.pool.QueryRow(b.ctx, `SELECT initial, pending, disabled, computing, awaiting_compute, failed, estimated FROM penstock.queue_status WHERE queue = 'work'`).
		Scan(&s[0], &s[1], &s[2], &s[3], &s[4], &s[5], &estimated))
	b.want(s, [6]int{2, 5, 1, 3, 4, 1})
	b.want(estimated, false)
	b.want(b.count(`SELECT count(*) FROM penstock.entry_status WHERE state = 'computing'`), 3)
	b.want(b.count(`SELECT count(*) FROM penstock.lock_status WHERE node IN ('here', 'there')`), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.node_status WHERE state = 'live' AND locks = 1`), 2)
}

func TestQueueStatusMarksEstimatesAndStaysNearTheTruth(t *testing.T) {
	b := newQueueBed(t, Config{})
	c, err := b.pool.Acquire(b.ctx)
	b.must(err)
	b.exec(c, `SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[12000]))`)
	b.exec(c, `SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[3000]), dues => array_fill(now() + interval '1 day', ARRAY[3000]))`)
	b.exec(c, `SELECT pg_stat_force_next_flush()`) // what a session reports after an ANALYZE is added to what that counted
	b.exec(c, `ANALYZE penstock.entry_work`)
	c.Release()
	var initial, pending int
	var estimated bool
	b.must(b.pool.QueryRow(b.ctx, `SELECT initial, pending, estimated FROM penstock.queue_status WHERE queue = 'work'`).Scan(&initial, &pending, &estimated))
	if !estimated || initial != 3000 || pending < 11000 || pending > 13000 {
		t.Errorf("initial %d, pending %d, estimated %v; want 3000, about 12000, true", initial, pending, estimated)
	}
}

// A crash loses the cumulative statistics, and a standby has none when it is promoted. The first push after it made the
// number of all entries one.
func TestTheDepthOfAQueueSurvivesTheLossOfStatistics(t *testing.T) {
	b := newQueueBed(t, Config{})
	conn, err := b.pool.Acquire(b.ctx) // one session: each counts for itself, and reports later
	b.must(err)
	defer conn.Release()
	for _, sql := range []string{
		`SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[12000]))`, `ANALYZE penstock.entry_work`,
		`SELECT pg_stat_force_next_flush()`, `SELECT pg_stat_reset()`,
		`SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[5]))`, `SELECT pg_stat_force_next_flush()`,
	} {
		b.exec(conn, sql)
	}
	b.want(b.count(`SELECT pg_stat_get_live_tuples('penstock.entry_work'::regclass)`), 5)
	b.want(b.count(`SELECT pending FROM penstock.queue_status WHERE queue = 'work'`), 12005)
	b.exec(b.pool, `ANALYZE penstock.entry_work`)
	b.want(b.count(`SELECT pending FROM penstock.queue_status WHERE queue = 'work'`), 12005)
}

// Beyond a hundred thousand failures are not counted: their number is the planner's.
func TestManyFailuresAreEstimated(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.failure (queue_id, entry_id, created_at, failed_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
	    SELECT $1, n, now(), now(), 1, 1, 0, '', 'x', 'x', 'x', '{}' FROM generate_series(1, 150000) n`, b.q.ID)
	b.exec(b.pool, `ANALYZE penstock.failure_default`)
	var failed int
	var estimated bool
	b.must(b.pool.QueryRow(b.ctx, `SELECT failed, estimated FROM penstock.queue_status WHERE queue = 'work'`).Scan(&failed, &estimated))
	if !estimated || failed < 140_000 || failed > 160_000 {
		t.Errorf("failed %d, estimated %v; want about 150000, true", failed, estimated)
	}
}

func TestStuckShowsLocksOfDeadAndUnknownNodes(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push("", "")
	b.claim(1)
	b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 1})
	b.want(b.count(`SELECT count(*) FROM penstock.stuck`), 0)
	tx := b.begin()
	b.exec(tx, `UPDATE penstock.node SET beat_at = now() - interval '2 hours' WHERE id = $1`, here)
	b.exec(tx, `DELETE FROM penstock.node WHERE id = $1`, there)
	var reasons string
	b.must(tx.QueryRow(b.ctx, `SELECT string_agg(reason, ', ' ORDER BY reason) FROM penstock.stuck`).Scan(&reasons))
	b.want(reasons, "node dead, node unknown")
	b.must(tx.Rollback(b.ctx))
}

func TestExplainNamesThePause(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.pushAll(b.pool, Push{Flow: "tenant"})[0]
	b.did(b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByFlow, Value: "tenant"}, By{Actor: "ada", Reason: "unpaid"}, time.Time{}))
	e, err := b.d.Explain(b.ctx, int64(id))
	b.must(err)
	for _, r := range e.Reasons {
		if r.Code == "paused" && strings.Contains(r.Text, `flow "tenant" is paused by ada`) && strings.Contains(r.Text, "unpaid") {
			return
		}
	}
	t.Errorf("reasons %+v do not name the pause", e.Reasons)
}
