package invalidation

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// partitioned is how many tables have a partition for each day: results, failures, two kinds of samples, decisions of scaling,
// minutes of models, sent callbacks.
const partitioned = 7

// inTxOf runs the transactions of a test on db.
func inTxOf(db postgres.DB) InTx {
	return func(ctx context.Context, fn func(pgx.Tx) error) error { return postgres.InTx(ctx, db, fn) }
}

func (b *bed) partitions(parent string) int {
	return b.count(`SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
	                 WHERE i.inhparent = $1::regclass AND c.relname ~ '_[0-9]{8}$'`, "penstock."+parent)
}

func TestPartitionsAreMadeDaysAheadAndOnce(t *testing.T) {
	b := newBed(t, Config{})
	n, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 3)
	if err != nil || n != 4*partitioned || b.partitions("result") != 4 || b.partitions("failure") != 4 {
		t.Fatalf("made %d (%v), there are %d and %d; want today and three days, of all", n, err, b.partitions("result"), b.partitions("failure"))
	}
	if n, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 3); n != 0 || err != nil {
		t.Errorf("made %d more (%v)", n, err)
	}
	b.push("", "K")
	for _, l := range b.claim(9) {
		b.settle(endAll(func(l *Lock, e EntryID) Ending {
			if l.Solo() {
				return Done(l, e, nil, 0)
			}
			return Fail(l, e, Failure{Error: "x"}, 0)
		}, l)...)
	}
	if n := b.count(`SELECT (SELECT count(*) FROM penstock.result_default) + (SELECT count(*) FROM penstock.failure_default)`); n != 0 {
		t.Errorf("%d outcomes went to the default partitions", n)
	}
	if n := b.count(`SELECT (SELECT count(*) FROM penstock.result) + (SELECT count(*) FROM penstock.failure)`); n != 2 {
		t.Errorf("%d outcomes, want 2", n)
	}
}

// A session that waits for a change of rights holds no name of a partition: the other one may need it.
func TestPartitionsAreNamedOnceRightsAreHeld(t *testing.T) {
	b := newBed(t, Config{})
	const days = 60
	rights := b.begin()
	b.exec(rights, `SELECT penstock.hold_rights()`)
	var free atomic.Bool // the rights, for which a maker waits no longer than 200 ms
	made := later(b, func() (n int, err error) {
		for err == nil && !free.Load() {
			n, err = EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), days)
		}
		return n, err
	})
	const waiting = `
SELECT count(*) FILTER (WHERE l.locktype = 'advisory' AND NOT l.granted), count(*) FILTER (WHERE l.mode = 'AccessExclusiveLock')
  FROM pg_locks l WHERE l.pid = (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1)`
	var waits, names int
	b.await("it waits for rights", func() bool {
		b.must(b.pool.QueryRow(b.ctx, waiting).Scan(&waits, &names))
		return waits > 0
	})
	if names > 0 {
		t.Errorf("it waits for rights and holds %d names", names)
	}
	b.commit(rights)
	free.Store(true)
	made()
}

func TestADayThatTheDefaultPartitionHasRowsOfStaysThere(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	b.settle(doneAll(b.claim(1)...)...)
	if n, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 1); n != 2*partitioned-1 || err != nil {
		t.Fatalf("made %d (%v), want tomorrow for results, and two days for the others", n, err)
	}
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 1 {
		t.Errorf("%d results, want 1", n)
	}
}

func TestMaintenanceGivesWay(t *testing.T) {
	b := newBed(t, Config{})
	reader := b.begin()
	b.exec(reader, `LOCK TABLE penstock.result_default, penstock.failure_default IN ACCESS SHARE MODE`)
	// It returns although the reader goes on.
	if n, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 0); n != partitioned-2 || err != nil {
		t.Fatalf("made %d (%v) past a reader, want those of samples and decisions alone", n, err)
	}
	b.commit(reader)
	if n, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 0); n != 2 || err != nil {
		t.Fatalf("made %d (%v), want 2 once the reader is gone", n, err)
	}
}

func TestPartitionsOfSeveralTablesAreNotLockedTogether(t *testing.T) {
	b := newBed(t, Config{})
	reader := b.begin()
	b.exec(reader, `SELECT FROM penstock.failure`)
	var gone atomic.Bool // the reader, whom a maker waits for no longer than 200 ms
	made := later(b, func() (n int, err error) {
		for err == nil && !gone.Load() {
			var more int
			more, err = EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 7)
			n += more
		}
		return n, err
	})
	b.awaitBlocked(reader) // results, whose turn is before, have theirs
	b.exec(reader, `SET LOCAL lock_timeout = '10ms'`)
	b.exec(reader, `SELECT FROM penstock.result`)
	b.commit(reader)
	gone.Store(true)
	if n := made(); n < 8 {
		t.Errorf("made %d, want those of results at least", n)
	}
}

func TestEndingsOnTheirWayWhileTheirDayGetsItsPartitionAreRecorded(t *testing.T) {
	for name, end := range map[string]func(*Lock) Ending{
		"done":      func(l *Lock) Ending { return Done(l, l.Entries[0].ID, nil, 0) },
		"cancelled": func(l *Lock) Ending { return Cancel(l, l.Entries[0].ID, "unwanted") },
		"failed":    func(l *Lock) Ending { return Fail(l, l.Entries[0].ID, Failure{Class: "x", Error: "x"}, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			b.push("")
			ending := last(end(b.claimOne()))
			maker := b.begin()
			if n, err := EnsurePartitions(b.ctx, maker, inTxOf(maker), 0); n != partitioned || err != nil {
				t.Fatalf("made %d (%v), want %d", n, err, partitioned)
			}
			settled := later(b, func() ([]Token, error) { return b.q.Settle(b.ctx, here, []Ending{ending}) })
			b.awaitBlocked(maker)
			b.commit(maker)
			if ours := settled(); len(ours) != 1 {
				t.Errorf("%d endings were recorded, want 1", len(ours))
			}
			if n := b.count(`SELECT (SELECT count(*) FROM penstock.result) + (SELECT count(*) FROM penstock.failure)`); n != 1 {
				t.Errorf("%d outcomes are recorded, want 1", n)
			}
		})
	}
}

func TestPartitionsPastTheLongestRetentionAreDropped(t *testing.T) {
	b := newBed(t, Config{ResultRetention: 3 * 24 * time.Hour})
	for _, day := range []string{"20200101", "20200102"} {
		b.exec(b.pool, `CREATE TABLE penstock.result_`+day+` PARTITION OF penstock.result FOR VALUES FROM ('`+day+`') TO ('`+day+` 24:00')`)
	}
	if _, err := EnsurePartitions(b.ctx, b.pool, inTxOf(b.pool), 1); err != nil {
		t.Fatal(err)
	}
	b.exec(b.pool, `DO $$ DECLARE day text := to_char((now() - interval '2 days') AT TIME ZONE 'UTC', 'YYYYMMDD'); BEGIN
	    EXECUTE format('CREATE TABLE penstock.result_%s PARTITION OF penstock.result FOR VALUES FROM (%L) TO (%L)', day, day || ' UTC', day || ' 24:00 UTC'); END $$`)
	if n, err := DropOldPartitions(b.ctx, inTxOf(b.pool)); n != 2 || err != nil {
		t.Fatalf("dropped %d (%v), want the two of 2020", n, err)
	}
	if n := b.partitions("result"); n != 3 {
		t.Errorf("%d partitions are left, want that of two days ago, today's and tomorrow's", n)
	}
}

func TestIdempotencyKeyIsKeptWhileTheFailureOfItsEntryIs(t *testing.T) {
	b := newBed(t, Config{})
	push := Push{IdempotencyKey: "once"}
	id := b.pushAll(b.pool, push)[0]
	lock := b.claimOne()
	b.settle(last(Fail(lock, id, Failure{Class: "x", Error: "x"}, 0)))
	b.exec(b.pool, `UPDATE penstock.idempotency SET created_at = now() - interval '2 days'`)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 0 {
		t.Fatalf("tidied %+v (%v) while the failure may be retried", got, err)
	}
	b.want(b.pushAll(b.pool, push)[0], id)
	b.exec(b.pool, `DELETE FROM penstock.failure`)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 1 {
		t.Errorf("tidied %+v (%v) once the failure is gone, want 1 key", got, err)
	}
}

// An entry may wait and run for longer than a day: its key counts from its end.
func TestIdempotencyKeyIsKeptWhileTheResultOfItsEntryIs(t *testing.T) {
	b := newBed(t, Config{})
	push := Push{IdempotencyKey: "once"}
	id := b.pushAll(b.pool, push)[0]
	b.exec(b.pool, `UPDATE penstock.idempotency SET created_at = now() - interval '25 hours'`)
	b.settle(doneAll(b.claimOne())...)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 0 {
		t.Fatalf("tidied %+v (%v) right after the end", got, err)
	}
	b.want(b.pushAll(b.pool, push)[0], id)
	b.exec(b.pool, `UPDATE penstock.result SET finished_at = now() - interval '25 hours'`)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 1 {
		t.Errorf("tidied %+v (%v) a day after the end, want 1 key", got, err)
	}
}

func TestUniqueKeyIsKeptWhileTheFailureOfItsEntryIs(t *testing.T) {
	b := newBed(t, Config{})
	push := Push{UniqueKey: "u", UniquePolicy: WhileActive}
	id := b.pushAll(b.pool, push)[0]
	b.settle(last(Fail(b.claimOne(), id, Failure{Error: "x"}, 0)))
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.UniqueKeys != 0 {
		t.Fatalf("tidied %+v (%v) while the failure may be retried", got, err)
	}
	b.exec(b.pool, `SELECT penstock.retry_failure($1)`, id)
	if pushed, err := b.q.Push(b.ctx, withPayload(push)); err != nil || pushed[0].ID != id || pushed[0].Verdict != Duplicate {
		t.Errorf("a push beside the retried entry got %v (%v), want a duplicate of %d", pushed, err, id)
	}
}

// The failure of an entry that has run may be retried: it has been started, whenever that is.
func TestARetriedFailureThatHasRunHasStarted(t *testing.T) {
	b := newBed(t, Config{})
	by := time.Now().Add(time.Hour)
	ids := b.pushAll(b.pool, Push{StartBy: by}, Push{StartBy: by}, Push{StartBy: by})
	locks := b.claim(3)
	failed, crashed, unread := locks[0], locks[1], locks[2]
	b.settle(last(Fail(failed, failed.Entries[0].ID, Failure{Error: "x"}, 0)), last(Release(crashed, crashed.Entries[0].ID, 0)),
		last(Release(unread, unread.Entries[0].ID, 0)))
	b.exec(b.pool, `UPDATE penstock.entry SET crashes = 1 WHERE id = $1`, crashed.Entries[0].ID)
	b.exec(b.pool, `SELECT penstock.fail_entry(penstock.take_entry(queue_id, id), 'unreadable', 'no') FROM penstock.entry`)
	for _, id := range ids {
		b.exec(b.pool, `SELECT penstock.retry_failure($1)`, id)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE start_by IS NOT NULL`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE start_by IS NOT NULL AND id = $1`, unread.Entries[0].ID), 1)
}

// A checkpoint is kept for as long as the entry, or its failure, may run again from it.
func TestACheckpointIsKeptWhileTheFailureOfItsEntryIs(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "")
	for i, lock := range b.claim(2) {
		run := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
		b.must(run.Save(b.ctx, "half"))
		if i == 0 {
			b.settle(last(Fail(lock, run.Entry.ID, Failure{Error: "x"}, 0)))
			continue
		}
		b.settle(last(Release(lock, run.Entry.ID, 0)))
		b.exec(b.pool, `SELECT penstock.fail_entry(penstock.take_entry($1, $2), 'no_instance', 'none')`, b.q.ID, run.Entry.ID)
	}
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.Progress != 0 {
		t.Fatalf("tidied %+v (%v) while the failures may be retried", got, err)
	}
	b.exec(b.pool, `SELECT penstock.retry_failure($1)`, ids[0])
	lock := b.claimOne()
	run := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
	var from string
	if there, err := run.Load(b.ctx, &from); !there || err != nil || from != "half" {
		t.Errorf("the retried run begins from %q (%v, %v), want its checkpoint", from, there, err)
	}
	b.settle(last(Done(lock, run.Entry.ID, nil, 0)))
	b.exec(b.pool, `SELECT penstock.discard_failure($1)`, ids[1])
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.Progress != 2 {
		t.Errorf("tidied %+v (%v) when both were gone, want the progress of 2", got, err)
	}
}

func TestTidyDeletesWhatStandsForNothingAndNothingElse(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool,
		Push{UniqueKey: "gone", UniquePolicy: WhileActive, IdempotencyKey: "gone"},
		Push{UniqueKey: "lives", UniquePolicy: WhileActive, IdempotencyKey: "lives"})
	first := b.claimOne()
	for _, id := range ids {
		b.exec(b.pool, `INSERT INTO penstock.progress (queue_id, entry_id, token, done) VALUES ($1, $2, 1, 0.5)`, b.q.ID, id)
	}
	b.settle(doneAll(first)...)
	b.exec(b.pool, `UPDATE penstock.idempotency SET created_at = now() - interval '2 days'`)
	b.exec(b.pool, `UPDATE penstock.result SET finished_at = now() - interval '2 days'`)
	b.pushAll(b.pool, Push{IdempotencyKey: "fresh"})
	b.exec(b.pool, `INSERT INTO penstock.result_default (queue_id, entry_id, created_at, finished_at, attempt, outcome)
	    VALUES ($1, 99991, now(), now() - interval '40 days', 0, 'done')`, b.q.ID)
	b.exec(b.pool, `INSERT INTO penstock.failure_default (queue_id, entry_id, created_at, failed_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
	    VALUES ($1, 99992, now(), now() - interval '40 days', 1, 1, 0, '', 'x', 'x', 'x', '{}')`, b.q.ID)
	b.exec(b.pool, `INSERT INTO penstock.throttle (queue_id, queue_wide, flow, until, reason) VALUES
	    ($1, true, '', now() - interval '2 hours', ''), ($1, false, 'x', now() + interval '2 hours', '')`, b.q.ID)
	b.must(setLimit(b.ctx, b.pool, "rate", limitOptions{Rate: 0.01, Burst: 10}))
	b.exec(b.pool, `INSERT INTO penstock.bucket (limit_id, flow, units, at) SELECT id, f, 5, now() - a FROM penstock."limit", (VALUES ('full', interval '10 min'), ('filling', '1 s')) v(f, a)`)

	got, err := Tidy(b.ctx, b.pool, 100)
	if want := (Tidied{2, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0}); err != nil || got != want {
		t.Fatalf("tidied %+v (%v), want %+v", got, err, want)
	}
	if again, err := Tidy(b.ctx, b.pool, 100); again.Total() != 0 || err != nil {
		t.Errorf("tidied %+v more (%v)", again, err)
	}
	for table, want := range map[string]int{"idempotency": 2, "uniqueness": 1, "progress": 1, "result": 0, "failure": 0, "throttle": 1, "bucket": 1} {
		if n := b.count(`SELECT count(*) FROM penstock.` + table); n != want {
			t.Errorf("%d rows in %s, want %d", n, table, want)
		}
	}
}

// The retention of a queue is a promise about that queue, whatever others keep: an outcome that is older cannot be read
// any more, and its row is deleted by the next passes.
func TestEachQueueKeepsOutcomesForItsOwnRetention(t *testing.T) {
	b := newBed(t, Config{ResultRetention: time.Hour, FailureRetention: 24 * time.Hour})
	other, err := Create(b.ctx, b.pool, "other", Config{ResultRetention: 720 * time.Hour, FailureRetention: 720 * time.Hour})
	b.must(err)
	b.days()
	const resultSQL = `INSERT INTO penstock.result (queue_id, entry_id, created_at, finished_at, attempt, outcome)
	    SELECT $1, $2 + n, now(), now() - age, 0, 'done' FROM unnest('{10 minutes,2 hours,3 days}'::interval[]) WITH ORDINALITY a(age, n)`
	const failureSQL = `INSERT INTO penstock.failure (queue_id, entry_id, created_at, failed_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
	    SELECT $1, $2 + n, now(), now() - age, 1, 1, 0, '', 'x', 'x', 'x', '{}' FROM unnest('{2 hours,3 days}'::interval[]) WITH ORDINALITY a(age, n)`
	for id, first := range map[int32]int{b.q.ID: 1000, other.ID: 2000} {
		b.exec(b.pool, resultSQL, id, first)
		b.exec(b.pool, failureSQL, id, first+10)
	}
	for id, want := range map[EntryID]error{1001: nil, 1002: ErrEntryNotFound, 1003: ErrEntryNotFound, 1011: nil, 1012: ErrEntryNotFound, 2002: nil, 2003: nil, 2012: nil} {
		if _, err := Outcome(b.ctx, b.pool, id); !errors.Is(err, want) {
			t.Errorf("outcome of entry %d: %v, want %v", id, err, want)
		}
	}
	for _, want := range []Tidied{{Results: 1, Failures: 1}, {Results: 1}, {}} {
		if got, err := Tidy(b.ctx, b.pool, 1); err != nil || got != want {
			t.Errorf("tidied %+v (%v), want %+v", got, err, want)
		}
	}
	b.want(b.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1`, b.q.ID), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1`, other.ID), 3)
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE queue_id = $1`, b.q.ID), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE queue_id = $1`, other.ID), 2)

	// A shorter retention counts for the rows that are there.
	b.exec(b.pool, `SELECT penstock.alter_queue('other', '{"result_retention": "1 hour"}')`)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.Results != 2 {
		t.Errorf("tidied %+v (%v), want two more results", got, err)
	}
}

// days makes partitions of results and failures for today and three days before.
func (b *bed) days() {
	b.exec(b.pool, `DO $$ DECLARE day text; BEGIN FOR back IN 0 .. 3 LOOP
	    day := to_char((now() - back * interval '1 day') AT TIME ZONE 'UTC', 'YYYYMMDD');
	    EXECUTE format('CREATE TABLE penstock.result_%s PARTITION OF penstock.result FOR VALUES FROM (%L) TO (%L)', day, day || ' UTC', day || ' 24:00 UTC');
	    EXECUTE format('CREATE TABLE penstock.failure_%s PARTITION OF penstock.failure FOR VALUES FROM (%L) TO (%L)', day, day || ' UTC', day || ' 24:00 UTC');
	    END LOOP; END $$`)
}

// Another queue that keeps outcomes for longer keeps those of no other.
func TestALongerRetentionOfAnotherQueueKeepsNoOldOutcomes(t *testing.T) {
	b := newBed(t, Config{ResultRetention: 24 * time.Hour, FailureRetention: 24 * time.Hour})
	b.days()
	b.exec(b.pool, `INSERT INTO penstock.result (queue_id, entry_id, created_at, finished_at, attempt, outcome)
	    VALUES ($1, 1, now(), now() - interval '26 hours', 0, 'done')`, b.q.ID)
	b.exec(b.pool, `INSERT INTO penstock.failure (queue_id, entry_id, created_at, failed_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
	    VALUES ($1, 2, now(), now() - interval '26 hours', 1, 1, 0, '', 'x', 'x', 'x', '{}')`, b.q.ID)
	b.want(b.count(`SELECT penstock.count_matching_to('work', 'retry_failures', '{"all": true}', NULL)`), 0)
	// No queue keeps results for longer: their day is dropped whole. Failures are kept for longer by queue webhook.
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got != (Tidied{Failures: 1}) {
		t.Errorf("tidied %+v (%v), want the failure", got, err)
	}
	_, err := Create(b.ctx, b.pool, "ledger", Config{ResultRetention: 720 * time.Hour})
	b.must(err)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got != (Tidied{Results: 1}) {
		t.Errorf("tidied %+v (%v), want what was past its retention before", got, err)
	}
}

// Each rotation adds a token, so that clients which rotate theirs each hour would leave 9,000 a year.
func TestTokensThatEndedLongAgoAreDeleted(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.api_token (name, hash, scopes, created_by, expires_at, revoked_at)
		SELECT 't', decode(repeat(lpad(n::text, 2, '0'), 32), 'hex'), '{push}', 'ada', now() + expires, now() + revoked
		  FROM (VALUES (1, NULL::interval, NULL::interval), (2, '1 day', NULL), (3, '-399 days', NULL), (4, NULL, '-399 days'),
		       (5, '-401 days', NULL), (6, NULL, '-401 days'), (7, '1 day', '-401 days'), (8, '-401 days', '-1 day')) v(n, expires, revoked)`)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got != (Tidied{Tokens: 4}) {
		t.Errorf("tidied %+v: %v", got, err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.api_token WHERE id <= 4`), 4)
}

// Rows that are in no partition of a day, and operations that have ended, go as well.
func TestSweepDeletesFromDefaultPartitionsAndOldOperations(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.callback_sent (entry_id, at, callback_id) VALUES (1, now() - interval '8 days', 1), (2, now() - interval '6 days', 2)`)
	b.exec(b.pool, `INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	    SELECT now() - d * interval '1 day', 'm', 1, 1, 1, 1, 1, 1, true, '[]', '' FROM unnest('{29,31}'::int[]) d`)
	b.exec(b.pool, `INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, until_id, created_at, status, ended_at)
	    SELECT $1, 'cancel', '{"all": true}', 1, 'ada', '', 0, 0, now() - interval '40 days', CASE WHEN d > 0 THEN 'done' ELSE 'running' END,
	           CASE WHEN d > 0 THEN now() - d * interval '1 day' END FROM unnest('{0,29,31}'::int[]) d`, b.q.ID)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got != (Tidied{Defaults: 2, Operations: 1}) {
		t.Errorf("tidied %+v (%v), want a callback of 8 days, a decision and an operation of 31", got, err)
	}
}

// Tidy makes the first step of a sweep.
func Tidy(ctx context.Context, db postgres.DB, limit int) (Tidied, error) {
	t, _, err := new(Tidier).Tidy(ctx, inTxOf(db), limit)
	return t, err
}

// What a statement reads does not grow with the keys that stay: a pass goes on where the one before ended.
func TestSweepReadsAPartOfTheKeysThatStayAtATime(t *testing.T) {
	b := newBed(t, Config{})
	const keys = 30_000
	b.exec(b.pool, `INSERT INTO penstock.entry (id, queue_id, status, priority, payload, unique_key, due_at)
		SELECT i, $1, 'initial', 1, '{}', 'u' || i, now() + interval '1 day' FROM generate_series(1, $2::int) i`, b.q.ID, keys)
	b.exec(b.pool, `INSERT INTO penstock.uniqueness (queue_id, key, entry_id) SELECT $1, 'u' || i, i FROM generate_series(1, $2::int) i`, b.q.ID, keys)
	b.exec(b.pool, `INSERT INTO penstock.idempotency (entry_id, created_at, queue_id, flow, key, fingerprint)
		SELECT i, now() - interval '30 days', $1, '', 'k' || i, '' FROM generate_series(1, $2::int) i`, b.q.ID, keys)
	// The last keys are those of entries that are gone.
	b.exec(b.pool, `INSERT INTO penstock.uniqueness (queue_id, key, entry_id) VALUES ($1, 'gone', $2)`, b.q.ID, keys+1)
	b.exec(b.pool, `INSERT INTO penstock.idempotency (entry_id, created_at, queue_id, flow, key, fingerprint)
		VALUES ($2, now() - interval '30 days', $1, '', 'gone', '')`, b.q.ID, keys+1)
	// So is the last firing older than 30 days, among those of a table whose space is used again.
	b.exec(b.pool, `INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
		SELECT i, at, at, i, false FROM generate_series(1, $1::int + 1) i
		 CROSS JOIN LATERAL (SELECT now() - CASE WHEN i > $1 THEN interval '31 days' ELSE interval '29 days' END AS at) x`, keys)
	b.exec(b.pool, `VACUUM (ANALYZE) penstock.uniqueness, penstock.idempotency, penstock.entry_work, penstock.cron_firing`)
	var s Tidier
	var found Tidied
	steps := 0
	for more := true; more; steps++ {
		var got Tidied
		var err error
		got, more, err = s.Tidy(b.ctx, inTxOf(b.pool), 100)
		b.must(err)
		found.UniqueKeys += got.UniqueKeys
		found.IdempotencyKeys += got.IdempotencyKeys
		found.Firings += got.Firings
	}
	if steps < 3 || s != (Tidier{}) {
		t.Errorf("%d keys of a kind were read in %d steps, and the next begins at %+v", keys, steps, s)
	}
	if want := (Tidied{UniqueKeys: 1, IdempotencyKeys: 1, Firings: 1}); found != want {
		t.Errorf("tidied %+v, want %+v", found, want)
	}
	for name, sql := range map[string]string{
		"uniqueness": tidyUniquenessSQL, "idempotency": tidyIdempotencySQL, "cron_firing": tidyFiringsSQL,
	} {
		var plan string
		tx := b.begin()
		b.exec(tx, `SET LOCAL plan_cache_mode = force_generic_plan`)
		b.exec(tx, `PREPARE sweep_`+name+` AS `+sql)
		rows, err := tx.Query(b.ctx, `EXPLAIN EXECUTE sweep_`+name+` (100, '(0,0)', '(64,0)')`)
		b.must(err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		b.must(err)
		plan = strings.Join(lines, "\n")
		if !strings.Contains(plan, "Tid Range Scan on "+name) || strings.Contains(plan, "Join") || strings.Contains(plan, "Seq Scan on entry_work") {
			t.Errorf("the sweep of %s does not look up entries one by one:\n%s", name, plan)
		}
		b.must(tx.Rollback(b.ctx))
	}
	b.exec(b.pool, `DELETE FROM penstock.entry`)
}

func TestTidyStopsAtItsLimit(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.progress (queue_id, entry_id, token) SELECT $1, i, 1 FROM generate_series(1, 10) i`, b.q.ID)
	for _, want := range []int{4, 4, 2, 0} {
		if got, err := Tidy(b.ctx, b.pool, 4); err != nil || got.Progress != want {
			t.Fatalf("tidied %d (%v), want %d", got.Progress, err, want)
		}
	}
}

// With many queues a step of results costs more than one of keys: a pass repeats those kinds alone that have rows left.
func TestStepsOfAPassAreOfTheKindsThatHaveRowsLeft(t *testing.T) {
	b := newBed(t, Config{})
	expired := func() {
		b.exec(b.pool, `INSERT INTO penstock.throttle (queue_id, queue_wide, flow, until, reason) VALUES ($1, true, '', now() - interval '2 hours', '')`, b.q.ID)
	}
	b.exec(b.pool, `INSERT INTO penstock.progress (queue_id, entry_id, token) SELECT $1, i, 1 FROM generate_series(1, 10) i`, b.q.ID)
	expired()
	var s Tidier
	step := func(want Tidied, left bool) {
		t.Helper()
		if got, more, err := s.Tidy(b.ctx, inTxOf(b.pool), 4); err != nil || got != want || more != left {
			t.Errorf("tidied %+v, more %v (%v), want %+v, %v", got, more, err, want, left)
		}
	}
	s.Begin()
	step(Tidied{Progress: 4, Throttles: 1}, true)
	expired()
	step(Tidied{Progress: 4}, true)
	s.Begin()
	step(Tidied{Progress: 2, Throttles: 1}, false)
	expired()
	step(Tidied{Throttles: 1}, false)
}

// The sweep of a key while a push with it waits: the push is answered as when it began, and later ones insert the key.
func TestTidyBesideAPushThatMetAnOldIdempotencyKey(t *testing.T) {
	b := newBed(t, Config{})
	old, other := Push{IdempotencyKey: "a"}, Push{IdempotencyKey: "b"}
	olds := b.pushAll(b.pool, old)
	b.settle(doneAll(b.claimOne())...)
	b.exec(b.pool, `UPDATE penstock.idempotency SET created_at = now() - interval '2 days'`)
	b.exec(b.pool, `UPDATE penstock.result SET finished_at = now() - interval '2 days'`)
	pusher := b.begin()
	others := b.pushAll(pusher, other)
	pushed := b.pushLater("a", "b")
	b.awaitBlocked(pusher)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 1 {
		t.Fatalf("tidied %+v (%v), want the old key", got, err)
	}
	b.commit(pusher)
	got := pushed()
	b.want(got.verdicts, []string{"replayed", "replayed"})
	b.want(got.ids, []EntryID{olds[0], others[0]})
	for _, want := range []Verdict{Inserted, Replayed} {
		again, err := b.q.Push(b.ctx, withPayload(old), withPayload(other))
		b.must(err)
		b.want([]Verdict{again[0].Verdict, again[1].Verdict}, []Verdict{want, Replayed})
	}
}

// pushedLater is the answer to such a push.
type pushedLater struct {
	ids      []EntryID
	verdicts []string
}

// pushLater pushes with idempotency keys beside the test: by SQL, since Push begins anew where it has waited for a quarter
// of a second, and after a deadlock.
func (b *bed) pushLater(keys ...string) func() pushedLater {
	return later(b, func() (p pushedLater, err error) {
		err = b.pool.QueryRow(b.ctx, `SELECT ids, verdicts FROM penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[$1::int]),
		    idempotency_keys => $2)`, len(keys), keys).Scan(&p.ids, &p.verdicts)
		return p, err
	})
}

// A push holds a key behind the one that is swept: it takes none before it any more, since another push may wait there.
func TestPushesBesideASweepOfTheirKeyNeverWaitInARing(t *testing.T) {
	b := newBed(t, Config{})
	keyed := func(key string) Push { return Push{IdempotencyKey: key} }
	olds := b.pushAll(b.pool, keyed("a"))
	b.settle(doneAll(b.claimOne())...)
	b.exec(b.pool, `UPDATE penstock.idempotency SET created_at = now() - interval '2 days'`)
	b.exec(b.pool, `UPDATE penstock.result SET finished_at = now() - interval '2 days'`)
	other := b.begin()
	others := b.pushAll(other, keyed("c"))
	long := b.pushLater("a", "b", "c")
	b.awaitBlocked(other)
	blocked := b.count(`SELECT pid FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`, other.Conn().PgConn().PID())
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.IdempotencyKeys != 1 {
		t.Fatalf("tidied %+v (%v), want the old key", got, err)
	}
	short := b.pushLater("a", "b")
	b.awaitBlockedBy(uint32(blocked)) //nolint:gosec // a process id
	b.commit(other)
	first, second := long(), short()
	b.want(first.verdicts, []string{"replayed", "inserted", "replayed"})
	b.want(first.ids, []EntryID{olds[0], first.ids[1], others[0]})
	b.want(second.verdicts, []string{"inserted", "replayed"})
	b.want(second.ids, []EntryID{second.ids[0], first.ids[1]})
}

// A push that takes a unique key over has its row in hand: the janitor passes it by.
func TestTidyLeavesAKeyThatAPushTakesOver(t *testing.T) {
	b := newBed(t, Config{})
	p := Push{UniqueKey: "u", UniquePolicy: WhileActive}
	b.pushAll(b.pool, p)
	b.settle(doneAll(b.claimOne())...)
	pusher := b.begin()
	b.pushAll(pusher, p)
	if got, err := Tidy(b.ctx, b.pool, 100); err != nil || got.UniqueKeys != 0 {
		t.Fatalf("tidied %+v (%v)", got, err)
	}
	b.commit(pusher)
	if pushed, err := b.q.Push(b.ctx, withPayload(p)); err != nil || pushed[0].Verdict != Duplicate {
		t.Errorf("the next push got %v (%v), want a duplicate", pushed, err)
	}
}
