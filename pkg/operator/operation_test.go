package operator_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func TestRetriedFailureComesBackUnderItsOldID(t *testing.T) {
	b := newQueueBed(t, Config{})
	finish := time.Now().Add(time.Hour)
	ids := b.pushAll(b.pool, Push{Name: "mail", FinishBy: finish}, Push{LockKey: "K", StartBy: finish})
	b.fail(Failure{Class: "input", Error: "boom 1"})
	b.exec(b.pool, `UPDATE penstock.failure SET start_by = now() WHERE lock_key = 'K'`)
	others := b.push("", "K")
	for _, id := range ids {
		b.must(b.do(operator.RetryFailure, id, ann))
	}
	if err := b.do(operator.RetryFailure, ids[0], ann); !errors.Is(err, ErrState) {
		t.Errorf("retry of an entry that is back: %v", err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.failure`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE attempt = 0 AND jsonb_array_length(history) = 1`), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE (id = $1 AND finish_by = $2) OR (id = $3 AND start_by IS NULL)`, ids[0], finish, ids[1]), 2)
	b.want(entryIDs(b.claim(1)...), others[:1]) // the returned one is last
	b.want(entryIDs(b.claim(1)...), []EntryID{ids[1], others[1]})
	b.want(entryIDs(b.claim(1)...), ids[:1])
}

// An entry that was started has met its start_by. One that may still be started keeps it while it is to come.
func TestARetriedFailureKeepsAStartByThatItHasNotMet(t *testing.T) {
	b := newQueueBed(t, Config{})
	for _, c := range []struct {
		attempt, crashes int
		left             time.Duration
		kept             bool
	}{
		{0, 0, time.Hour, true}, {0, 0, -time.Hour, false}, {1, 0, time.Hour, false}, {0, 1, time.Hour, false},
	} {
		id := b.pushAll(b.pool, Push{StartBy: time.Now().Add(time.Hour)})[0]
		b.fail(Failure{Error: "boom"})
		b.exec(b.pool, `UPDATE penstock.failure SET attempt = $2, crashes = $3, start_by = clock_timestamp() + $4 WHERE entry_id = $1`,
			id, c.attempt, c.crashes, c.left)
		b.must(b.do(operator.RetryFailure, id, ann))
		if got := b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND start_by IS NOT NULL`, id) == 1; got != c.kept {
			t.Errorf("%+v: start_by kept: %v", c, got)
		}
		b.claim(1)
	}
}

func TestDiscardedFailureIsGone(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.push("")[0]
	if err := b.do(operator.DiscardFailure, id, ann); !errors.Is(err, ErrState) {
		t.Errorf("discard of a living entry: %v", err)
	}
	b.fail(Failure{Error: "boom"})
	b.must(b.do(operator.DiscardFailure, id, ann))
	if err := b.do(operator.DiscardFailure, id, ann); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("discard of what is gone: %v", err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'discard_failure' AND detail->>'fingerprint' = 'boom'`), 1)
}

func TestOperationChangesWhatTheFilterMatchesAndNothingElse(t *testing.T) {
	b := newQueueBed(t, Config{})
	for i := range 6 {
		b.pushAll(b.pool, Push{Name: fmt.Sprint("job ", i%2)})
		b.fail(Failure{Class: []string{"input", "oom"}[i%2], Error: fmt.Sprint("no file ", i)})
	}
	same := operator.OperationRequest{Queue: "work", Verb: operator.RetryFailures, Filter: operator.Filter{Pattern: "no file _", Class: "oom"}}
	n, _, err := b.d.CountFirst(b.ctx, same)
	b.must(err)
	b.want(n, 3)
	op := b.start(same)
	b.want(b.runOperations(), 3)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE name = 'job 1'`), 3)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE id = $1 AND status = 'done' AND matched = 3 AND changed = 3`, op), 1)
	b.want(b.runOperations(), 0)
	b.start(operator.OperationRequest{Verb: operator.DiscardFailures, Filter: operator.Filter{OlderThan: time.Hour}})
	b.want(b.runOperations(), 0)
	b.start(operator.OperationRequest{Verb: operator.DiscardFailures, Filter: operator.Filter{Name: "job 0"}})
	b.want(b.runOperations(), 3)
}

func TestOperationGoesOnWhereItStopped(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[1200]))`)
	op := b.start(operator.OperationRequest{Verb: operator.DeleteEntries, Filter: operator.Filter{All: true}, PerSecond: 2_000_000_000})
	for _, want := range []int{500, 500, 200} {
		b.want(b.count(`SELECT changed FROM penstock.step_operation($1)`, op), want)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE status = 'done' AND changed = 1200`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
}

// Another transaction has an entry locked: it is changed when it is free, and holds up no other.
func TestOperationPassesByBusyEntries(t *testing.T) {
	b := newQueueBed(t, Config{})
	ids := b.push(make([]string, 30)...)
	tx := b.begin()
	b.exec(tx, `SELECT FROM penstock.entry WHERE id = ANY ($1) FOR UPDATE`, []EntryID{ids[0], ids[7]})
	op := b.start(operator.OperationRequest{Verb: operator.DisableAll, Filter: operator.Filter{All: true}, PerSecond: 2_000_000_000})
	b.want(b.runOperations(), 28)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE id = $1 AND status = 'running' AND cardinality(busy) = 2`, op), 1)
	b.want(b.runOperations(), 0)
	b.must(tx.Rollback(b.ctx))
	b.want(b.runOperations(), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE id = $1 AND status = 'done' AND changed = 30 AND cardinality(busy) = 0`, op), 1)
}

// However many are busy, an operation remembers a thousand, and waits for some of them before it goes on.
func TestOperationRemembersABoundedNumberOfBusyEntries(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[1500]))`)
	tx := b.begin()
	b.exec(tx, `SELECT FROM penstock.entry WHERE id <= (SELECT min(id) + 1399 FROM penstock.entry) FOR UPDATE`)
	op := b.start(operator.OperationRequest{Verb: operator.DisableAll, Filter: operator.Filter{All: true}, PerSecond: 2_000_000_000})
	for range 5 {
		b.runOperations()
	}
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE id = $1 AND status = 'running' AND cardinality(busy) = 1000`, op), 1)
	b.must(tx.Rollback(b.ctx))
	for range 20 {
		b.runOperations()
	}
	b.want(b.count(`SELECT changed FROM penstock.operation WHERE id = $1 AND status = 'done'`, op), 1500)
}

func TestOperationIsThrottledAndCancelled(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push(make([]string, 20)...)
	op := b.start(operator.OperationRequest{Verb: operator.CancelEntries, Filter: operator.Filter{All: true}, PerSecond: 5})
	began := time.Now()
	first := b.runOperations()
	if most := 5 + 1 + int(5*time.Since(began).Seconds()); first == 0 || first > most {
		t.Errorf("changed %d at once, want 1 to %d", first, most)
	}
	b.must(b.do(operator.CancelOperation, op, ann))
	b.want(b.runOperations(), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 20-first)
	if err := b.do(operator.CancelOperation, op, ann); !errors.Is(err, ErrState) {
		t.Errorf("cancel of an operation that has ended: %v", err)
	}
	if err := b.do(operator.CancelOperation, op+1, ann); !errors.Is(err, ErrNotFound) {
		t.Errorf("cancel of an operation that is not there: %v", err)
	}
}

func TestOperationLeavesAloneWhatCameAfterIt(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push("", "K")
	b.start(operator.OperationRequest{Verb: operator.CancelEntries, Filter: operator.Filter{All: true}})
	after := b.push("", "K")
	b.want(b.runOperations(), 2)
	left := entryIDs(b.claim(5)...)
	slices.Sort(left)
	b.want(left, after)
}

func TestOperationRefusesAFilterThatItDoesNotKnow(t *testing.T) {
	b := newQueueBed(t, Config{})
	for _, o := range []operator.OperationRequest{
		{Verb: operator.CancelEntries},
		{Verb: operator.CancelEntries, Filter: operator.Filter{Class: "input"}},
		{Verb: "explode", Filter: operator.Filter{All: true}},
	} {
		o.Queue = "work"
		if _, err := b.d.StartOperation(b.ctx, o); !errors.Is(err, ErrInvalid) {
			t.Errorf("operation %s with %+v: %v", o.Verb, o.Filter, err)
		}
	}
	for _, filter := range []string{`{"colour": "x"}`, `{"older_than": "soon"}`, `{"ids": ["x'); DROP TABLE penstock.entry; --"]}`, `[]`, `{"name": null}`} {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.start_operation('work', 'cancel', $1)`, json.RawMessage(filter))
		if code := postgres.Code(err); code != "PS002" {
			t.Errorf("filter %s: %v", filter, err)
		}
	}
	b.push("")
	n, _, err := b.d.CountFirst(b.ctx, operator.OperationRequest{Queue: "work", Verb: operator.CancelEntries, Filter: operator.Filter{Name: `'; DROP TABLE penstock.entry; --`}})
	b.must(err)
	b.want(n, 0)
}

// An operation lasts for as long as its throttle makes it: its filter means what it meant when it began.
func TestAnOperationLeavesWhatComesAfterItsBegin(t *testing.T) {
	b := newQueueBed(t, Config{})
	// A time as a text of this style is another time when it is read again: IST is the zone of Israel, too.
	for _, setting := range []string{"DateStyle = 'SQL, DMY'", "TimeZone = 'Asia/Kolkata'", "IntervalStyle = sql_standard"} {
		b.exec(b.pool, `DO $do$ BEGIN EXECUTE format($$ALTER DATABASE %I SET `+setting+`$$, current_database()); END $do$`)
	}
	b.pool.Reset()
	failOne := func(text string) {
		b.settle(endAll(func(l *Lock, e EntryID) Ending { return Fail(l, e, Failure{Error: text}, 0) }, b.claim(1)...)...)
	}
	b.push("", "")
	failOne("seen")
	id := b.count(`SELECT penstock.start_operation('work', 'discard_failures', '{"all": true}')`)
	failOne("not seen by anybody")
	b.exec(b.pool, `SELECT penstock.step_operation($1)`, id)
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE error = 'seen'`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.failure`), 1)

	id = b.count(`SELECT penstock.start_operation('work', 'cancel', '{"older_than": "1 hour"}')`)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE id = $1 AND NOT filter ? 'older_than'
		AND (filter->>'before')::timestamptz BETWEEN created_at - interval '1 hour' AND clock_timestamp() - interval '1 hour'`, id), 1)
}

// A time in a filter is read once, in the session that begins the operation. Each step read it again, in the time zone of
// the leader and at its time.
func TestATimeInAFilterIsReadOnce(t *testing.T) {
	b := newQueueBed(t, Config{})
	tx := b.begin()
	b.exec(tx, `SET LOCAL TimeZone = 'Asia/Kolkata'`)
	b.exec(tx, `SELECT penstock.start_operation('work', 'cancel', jsonb_build_object('before', t)) FROM unnest('{now, 2026-01-01 00:00}'::text[]) t`)
	b.must(tx.Commit(b.ctx))
	b.want(b.count(`SELECT count(*) FROM penstock.operation
	                 WHERE (filter->>'before')::timestamptz = '2025-12-31 18:30Z' OR filter->>'before' LIKE '%-%T%'`), 2)
}

// After the clock was set back an operation has a last step of a time to come. It waited until then.
func TestAnOperationGoesOnAfterTheClockWasSetBack(t *testing.T) {
	b := newQueueBed(t, Config{})
	for _, column := range []string{"stepped_at", "created_at"} {
		b.push("", "")
		op := b.start(operator.OperationRequest{Verb: operator.CancelEntries, Filter: operator.Filter{All: true}, PerSecond: 1})
		b.exec(b.pool, `UPDATE penstock.operation SET `+column+` = now() + interval '1 hour' WHERE id = $1`, op)
		b.want(b.count(`SELECT changed FROM penstock.step_operation($1)`, op), 1)
		b.must(b.do(operator.CancelOperation, op, ann))
	}
}

// Before a pause of a name ends its entries are counted, in a transaction that may take two seconds.
func TestLongASwitchDoesNotCountAWholeQueue(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[12000]), names => array_fill('mail'::text, ARRAY[12000]))`)
	for _, verb := range []operator.Verb{operator.DisableEntry, operator.EnableEntry} {
		_, err := b.d.SwitchEntries(b.ctx, verb, "work", operator.ByName, "mail", ann)
		b.must(err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE verb = 'disable' AND matched = 10000`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE verb = 'enable' AND matched = 500`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.operation WHERE partial`), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'start_operation' AND detail @> '{"partial": true}'`), 2)
}

// Filters without an index would read all of a deep queue before anything begins, in the time of a request.
func TestLongAnOperationBeginsWithoutReadingAllOfADeepQueue(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.entry (id, queue_id, status, priority, flow, payload, due_at)
		SELECT n, $1, 'initial', 1, CASE WHEN n > 100000 THEN 'acme' ELSE '' END, '{}', now() + interval '1 day' FROM generate_series(1, 100001) n`, b.q.ID)
	b.exec(b.pool, `SELECT setval('penstock.entry_id_seq', 200000)`)
	o := operator.OperationRequest{Queue: "work", Verb: operator.CancelEntries, Filter: operator.Filter{Flow: "acme"}, PerSecond: 2_000_000_000}
	if n, whole, err := b.d.CountFirst(b.ctx, o); n != 0 || whole || err != nil {
		t.Errorf("counted %d, and whole %v (%v), want none of the first 100,000", n, whole, err)
	}
	op := b.start(o)
	b.want(b.count(`SELECT matched FROM penstock.operation WHERE id = $1`, op), 0)
	b.want(b.runOperations(), 1)
	b.want(b.count(`SELECT matched FROM penstock.operation WHERE id = $1 AND status = 'done'`, op), 1)
}

func TestDisabledNameCoversWhatIsThereAndWhatComes(t *testing.T) {
	b := newQueueBed(t, Config{})
	first := b.pushAll(b.pool, Push{Name: "mail"}, Push{Name: "mail", LockKey: "K"}, Push{Name: "print"})
	_, err := b.d.SwitchEntries(b.ctx, operator.DisableEntry, "work", operator.ByName, "mail", ann)
	b.must(err)
	then := b.pushAll(b.pool, Push{Name: "mail"})
	b.want(b.reasons(first[0]), []string{"disabled"})
	b.want(entryIDs(b.claim(5)...), first[2:])
	_, err = b.d.SwitchEntries(b.ctx, operator.DisableEntry, "work", operator.ByLockKey, "K", ann)
	b.must(err)
	_, err = b.d.SwitchEntries(b.ctx, operator.EnableEntry, "work", operator.ByName, "mail", ann)
	b.must(err)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE priority < 0`), 1) // that of K
	b.want(entryIDs(b.claim(1)...), first[:1])
	b.want(entryIDs(b.claim(1)...), then)
	_, err = b.d.SwitchEntries(b.ctx, operator.EnableEntry, "work", operator.ByLockKey, "K", ann)
	b.must(err)
	b.want(entryIDs(b.claim(1)...), first[1:2])
	if _, err := b.d.SwitchEntries(b.ctx, operator.EnableEntry, "work", operator.ByLockKey, "K", ann); !errors.Is(err, ErrState) {
		t.Errorf("enable of what is not disabled: %v", err)
	}
}

func TestRetriedFailureOfADisabledNameStaysDisabled(t *testing.T) {
	b := newQueueBed(t, Config{})
	id := b.pushAll(b.pool, Push{Name: "mail"})[0]
	b.fail(Failure{Error: "boom"})
	_, err := b.d.SwitchEntries(b.ctx, operator.DisableEntry, "work", operator.ByName, "mail", ann)
	b.must(err)
	b.must(b.do(operator.RetryFailure, id, ann))
	b.want(len(b.claim(1)), 0)
	_, err = b.d.SwitchEntries(b.ctx, operator.EnableEntry, "work", operator.ByName, "mail", ann)
	b.must(err)
	b.want(entryIDs(b.claim(1)...), []EntryID{id})
}

func TestCapacityCountsWhatOperatorsTakeAndGive(t *testing.T) {
	b := newQueueBed(t, Config{Capacity: 10})
	ids := b.push(make([]string, 10)...)
	for _, id := range ids[:5] {
		b.cancel(id)
	}
	b.push(make([]string, 5)...)
	if _, err := b.q.Push(b.ctx, Push{Payload: []byte(`{}`)}); !errors.Is(err, ErrQueueFull) {
		t.Errorf("push to a full queue: %v", err)
	}
}
