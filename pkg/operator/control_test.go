package operator_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func TestPauseSaysWhoWhyAndUntil(t *testing.T) {
	b := newQueueBed(t, Config{})
	until := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	b.did(b.d.Do(b.ctx, operator.PauseQueue, "work", ann, until))
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	p, paused := q.Paused("", time.Now())
	if !paused || p.Actor != "ann" || p.Reason != ann.Reason {
		t.Fatalf("paused is %t by %+v", paused, p)
	}
	// Counted from the answer of the database, which may take its time.
	if late := p.Until.Sub(until); late < -time.Second || late > time.Minute {
		t.Errorf("it ends %v after the time that was asked for", late)
	}
	b.must(b.do(operator.ResumeQueue, "work", ann))
	q, err = Open(b.ctx, b.pool, "work")
	b.must(err)
	if p, paused := q.Paused("", time.Now()); paused {
		t.Fatalf("resumed queue is paused by %+v", p)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE actor = 'ann' AND verb IN ('pause_queue', 'resume_queue')`), 2)
}

func TestPauseRefusesAnEndThatHasPassedAndAQueueThatIsNotThere(t *testing.T) {
	b := newQueueBed(t, Config{})
	if _, err := b.d.Do(b.ctx, operator.PauseQueue, "work", ann, time.Now().Add(-time.Second)); !errors.Is(err, ErrInvalid) {
		t.Errorf("pause until the past: %v", err)
	}
	if _, err := b.d.Do(b.ctx, operator.PauseQueue, "nowhere", ann, time.Time{}); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("pause of a queue that is not there: %v", err)
	}
}

func TestDisabledQueueStillAccepts(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.must(b.do(operator.DisableQueue, "work", By{}))
	b.push("")
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	if q.Disabled == nil || q.Disabled.Actor == "" {
		t.Fatalf("disabled is %+v", q.Disabled)
	}
	b.must(b.do(operator.EnableQueue, "work", By{}))
	if q, err = Open(b.ctx, b.pool, "work"); err != nil || q.Disabled != nil {
		t.Fatalf("enabled queue is disabled by %+v (%v)", q.Disabled, err)
	}
}

func TestDrainIsOrderedAtTheNextHeartbeat(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.must(b.do(operator.DrainNode, here, ann))
	o, err := Renew(b.ctx, b.pool, here, Beat{Tokens: []Token{}})
	if err != nil || !o.Draining || o.Reason != ann.Reason {
		t.Fatalf("orders are %+v (%v)", o, err)
	}
	if err := b.do(operator.DrainNode, 99, ann); !errors.Is(err, ErrNotFound) {
		t.Errorf("drain of a node that is not there: %v", err)
	}
}

func TestDisabledEntryIsNotClaimedAndComesBackWhereItStood(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push("", "", "")
	b.must(b.do(operator.DisableEntry, ids[0], ann))
	b.must(b.do(operator.DisableEntry, ids[0], ann)) // a second time does nothing
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE entry_id = $1`, ids[0]), 0)
	b.must(b.do(operator.EnableEntry, ids[0], ann))
	b.want(entryIDs(b.claim(1)...), ids[:1])
	b.want(len(b.claim(10)), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE verb IN ('disable_entry', 'enable_entry')`), 2)
}

func TestDisabledEntryOfAGroupLetsTheOthersPass(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push("K", "K", "K")
	b.must(b.do(operator.DisableEntry, ids[0], ann))
	lock := b.claimOne()
	b.want(entryIDs(lock), ids[1:])
	b.must(b.do(operator.EnableEntry, ids[0], ann))
	b.settle(doneAll(lock)...)
	b.want(entryIDs(b.claim(1)...), ids[:1])
}

func TestDisablingTheWholeGroupLeavesNothingToClaimUntilEnabled(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push("K", "K")
	for _, id := range ids {
		b.must(b.do(operator.DisableEntry, id, ann))
	}
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	for _, id := range ids {
		b.must(b.do(operator.EnableEntry, id, ann))
	}
	b.want(entryIDs(b.claim(10)...), ids)
}

func TestRunningEntryThatIsDisabledEndsItsRun(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push("", "")
	locks := b.claim(2)
	for _, id := range ids {
		b.must(b.do(operator.DisableEntry, id, ann))
	}
	b.settle(append(doneAll(locks[0]), releaseAll(locks[1])...)...)
	b.want(b.outcome(ids[0]).Outcome, "done")
	b.want(len(b.claim(1)), 0) // handed back, but disabled
	b.must(b.do(operator.EnableEntry, ids[1], ann))
	b.want(entryIDs(b.claim(1)...), ids[1:])
}

func TestEntryEnabledWhileItRunsIsClaimedOnce(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push("", "K")
	locks := b.claim(2)
	for _, id := range entryIDs(locks...) {
		b.must(b.do(operator.DisableEntry, id, ann))
		b.must(b.do(operator.EnableEntry, id, ann))
	}
	b.want(len(b.claim(5)), 0)
	b.settle(releaseAll(locks...)...)
	b.want(entryIDs(b.claim(5)...), entryIDs(locks...))
}

func TestDisabledEntryThatIsNotDueIsPromotedButNotClaimed(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)})[0]
	b.must(b.do(operator.DisableEntry, id, ann))
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = now() WHERE id = $1`, id)
	n, err := b.q.Promote(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want(len(b.claim(1)), 0)
	b.must(b.do(operator.EnableEntry, id, ann))
	b.want(entryIDs(b.claim(1)...), []EntryID{id})
}

func TestCancelEndsWhatDoesNotRun(t *testing.T) {
	b := newQueueBed(t, Config{})
	solo := b.push("", "")
	group := b.push("K", "K", "K")
	later := b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)})[0]
	disabled := b.push("")[0]
	b.must(b.do(operator.DisableEntry, disabled, ann))
	for _, id := range []EntryID{solo[0], group[0], group[2], later, disabled} {
		b.want(b.cancel(id), operator.CancelDone)
		e := b.outcome(id)
		b.want([]string{e.Outcome, e.Reason}, []string{"cancelled", ann.Reason})
	}
	b.want(entryIDs(b.claim(10)...), []EntryID{solo[1], group[1]})
}

func TestCancelOfTheLastOfAGroupTakesItsReadyRow(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.want(b.cancel(b.push("K")[0]), operator.CancelDone)
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	b.want(entryIDs(b.claim(1)...), []EntryID(nil))
	next := b.push("K")
	b.want(entryIDs(b.claim(1)...), next)
}

func TestCancelOfWhatIsNotThereSaysSo(t *testing.T) {
	b := newQueueBed(t, Config{})
	if _, err := b.d.CancelEntry(b.ctx, int64(1<<40), ann); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("cancel of an unknown entry: %v", err)
	}
	id := b.push("")[0]
	b.settle(doneAll(b.claimOne())...)
	if _, err := b.d.CancelEntry(b.ctx, int64(id), ann); !errors.Is(err, ErrState) {
		t.Errorf("cancel of a done entry: %v", err)
	}
}

// A reader of the audit does not see a worker's URL or secrets.
func TestTheAuditHasNoPasswordsOfAddresses(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.register_model('m', '{"protocol": "dispatcher", "type": "sync"}', 'a test')`)
	b.exec(b.pool, `SELECT penstock.register_instance('m', 'gpu-1', 'http://10.0.0.7:8000/run', 1, '{"spare": "https://a:hunter2@b/"}', 'a test')`)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE detail::text LIKE '%hunter2%'`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE detail->>'endpoint' = 'http://10.0.0.7:8000/run'
	                   AND detail#>>'{labels,spare}' = 'https://a:***@b/'`), 1)
}

// A verb in psql that gives no reason is carried out, and warns.
func TestAVerbWithoutAReasonWarns(t *testing.T) {
	b := newQueueBed(t, Config{})
	cc := b.pool.Config().ConnConfig.Copy()
	var warnings []string
	cc.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warnings = append(warnings, n.Message) }
	conn, err := pgx.ConnectConfig(b.ctx, cc)
	b.must(err)
	defer conn.Close(context.Background())
	b.exec(conn, `SELECT penstock.pause_queue('work')`)
	b.exec(conn, `SELECT penstock.resume_queue('work', 'the window is over')`)
	b.want(warnings, []string{"pause_queue of work gives no reason"})
}

func TestAListOfNodesThatIsFullHasNodesOfEachState(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.node (id, name, application, kind, beat_at)
	                SELECT n, 'live-' || n, 'default', 'task', clock_timestamp() FROM generate_series(1, 9) n
	                UNION ALL VALUES (10, 'x-dead', 'default', 'task', clock_timestamp() - interval '1 hour'),
	                                 (11, 'y-gateway', 'default', 'gateway', clock_timestamp())`)
	found, err := b.d.NodesOfEachState(b.ctx, 4)
	b.must(err)
	var names []string
	for _, n := range found {
		names = append(names, n.Name)
	}
	b.want(names, []string{"here", "live-1", "x-dead", "y-gateway"})
}
