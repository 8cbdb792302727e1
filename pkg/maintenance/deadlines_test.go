package maintenance_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
)

const heldLocks = `SELECT count(*) FROM penstock.lock`

func TestDueEntryIsPromotedAtOnce(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`CREATE TABLE ready_at (at timestamptz)`)
	f.exec(`CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
	        'BEGIN INSERT INTO ready_at VALUES (clock_timestamp()); RETURN NULL; END'`)
	f.exec(`CREATE TRIGGER note AFTER INSERT ON penstock.ready FOR EACH ROW EXECUTE FUNCTION note()`)
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '2 seconds')`)
	run(t, maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: time.Hour}))
	eventually(t, "the entry is ready", func() bool { return f.count(`SELECT count(*) FROM ready_at`) == 1 })
	var late float64
	err := f.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM at - due_at)::float8 FROM ready_at, penstock.entry`).Scan(&late)
	if err != nil || late < 0 { // nor does it wait for the pause of an hour, in which the wait above would end
		t.Errorf("ready %v s after it was due (%v)", late, err)
	}
	t.Logf("ready %.0f ms after it was due", late*1000)
}

// A clock that has jumped ahead by hours ends nothing and promotes nothing until it is believed.
func TestAClockThatHasJumpedEndsNoEntry(t *testing.T) {
	for _, c := range []struct {
		ahead time.Duration
		held  int
	}{{10 * time.Hour, 2}, {2 * time.Hour, 0}} {
		f := newUsualFleet(t)
		f.exec(`SELECT penstock.push('work', '{}', finish_by => clock_timestamp() + interval '1 ms')`)
		f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '1 ms')`)
		f.exec(`SELECT pg_sleep(0.01)`)
		clock := &duty.Clock{}
		if err := clock.Check(time.Now().Add(-c.ahead)); err != nil {
			t.Fatal(err)
		}
		lines := make(logged, 1)
		cfg := maintenance.Config{
			Pause: time.Millisecond, Clock: clock, Log: slog.New(slog.NewTextHandler(lines, nil)),
		}
		run(t, maintenance.NewDeadlines(f.pool, &term{db: f.pool}, cfg))
		if c.held > 0 {
			select {
			case line := <-lines:
				if !strings.Contains(line, "wait until the database's clock is believed") {
					t.Errorf("logged: %s", line)
				}
			case <-time.After(time.Minute):
				t.Error("no pass said that the clock has jumped")
			}
		}
		held := func() int {
			return f.count(`SELECT count(*) FROM penstock.entry WHERE status = 'initial' OR finish_by IS NOT NULL`)
		}
		eventually(t, "what is not held is done", func() bool { return held() == c.held })
	}
}

// The clock was a year ahead for a moment, in which an entry was retried: it would wait for a year.
func TestAnEntryThatWasRetriedWhileTheClockWasAheadComesDue(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '1 hour') FROM generate_series(1, 3)`)
	f.exec(`UPDATE penstock.entry SET attempt = 1, due_at = clock_timestamp() + interval '1 year 1 s',
		history = jsonb_build_array(jsonb_build_object('at', clock_timestamp() + interval '1 year')) WHERE id = (SELECT max(id) FROM penstock.entry)`)
	run(t, maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond}))
	eventually(t, "the entry is ready", func() bool {
		return f.count(`SELECT count(*) FROM penstock.ready WHERE entry_id = (SELECT max(id) FROM penstock.entry)`) == 1
	})
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE status = 'initial'`); n != 2 {
		t.Errorf("%d entries wait for their time, want the 2 that were pushed with one", n)
	}
}

// failsOnce is a term of which the first transaction fails.
type failsOnce struct {
	*term
	failed atomic.Bool
}

func (f *failsOnce) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	if f.failed.CompareAndSwap(false, true) {
		return errors.New("the statement took too long")
	}
	return f.term.InTx(ctx, fn)
}

// Nothing else brings the duty back: nothing else comes due, and the pause is an hour.
func TestAPassThatFailedIsTriedAgainBeforeThePauseIsOver(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '1 second')`)
	fence := &failsOnce{term: &term{db: f.pool}}
	run(t, maintenance.NewDeadlines(f.pool, fence, maintenance.Config{Pause: time.Hour, Log: slog.New(slog.DiscardHandler)}))
	eventually(t, "the entry is ready", func() bool { return f.count(`SELECT count(*) FROM penstock.ready`) == 1 })
	if !fence.failed.Load() {
		t.Error("no transaction failed")
	}
}

func TestTimedLateEntryExpiresWithinTwoSecondsWithoutAThread(t *testing.T) {
	f := newUsualFleet(t)
	m := machine.WatchTest(t, f.pool)
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{})
	run(t, duty)
	f.exec(`SELECT penstock.push('work', '1', start_by => clock_timestamp() + interval '1 second')`)
	f.exec(`SELECT penstock.push('work', '2', finish_by => clock_timestamp() + interval '1 second')`)
	f.exec(`SELECT penstock.push('work', '3', due_at => clock_timestamp() + interval '1 hour', start_by => clock_timestamp() + interval '2 hours')`)
	eventually(t, "two entries expired", func() bool {
		return f.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'expired'`) == 2
	})
	if left := f.count(`SELECT count(*) FROM penstock.entry`); left != 1 {
		t.Errorf("%d entries are left, want the one whose time has not come", left)
	}
	var deadline, expired time.Time
	if err := f.pool.QueryRow(t.Context(), `SELECT created_at + interval '1 second', finished_at FROM penstock.result
	                                         ORDER BY finished_at - created_at DESC LIMIT 1`).Scan(&deadline, &expired); err != nil {
		t.Fatal(err)
	}
	if expired.Before(deadline) {
		t.Errorf("expired at %s, before %s", expired, deadline)
	}
	m.Judge(t, "the expiry after the deadline", deadline, expired, 2*time.Second)
}

// The cancel was requested while the entry ran; then its node died, and recovery released the entry.
func TestWishToCancelOutlivesTheNode(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(time.Second)
	f.push(1, "")
	f.claim(node)
	f.exec(`SELECT penstock.cancel_entry((SELECT id FROM penstock.entry), 'not wanted any more')`)
	f.exec(`UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 minute'`)
	var hints atomic.Int32
	t.Cleanup(func() { // when the duty has ended
		if n := hints.Load(); n != 0 {
			t.Errorf("%d hints, and no entry became ready", n)
		}
	})
	run(t, maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: 20 * time.Millisecond, Hint: func(int32) { hints.Add(1) },
	}))
	held, err := invalidation.HeldLocks(t.Context(), f.pool)
	if err != nil || len(held) != 1 {
		t.Fatalf("%d locks are held (%v)", len(held), err)
	}
	if r, err := f.q.Recover(t.Context(), []invalidation.LockRef{held[0].LockRef}, nil, true); err != nil || len(r.Freed) != 1 {
		t.Fatalf("recovered %v, %v", r, err)
	}
	eventually(t, "the entry is cancelled", func() bool {
		return f.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'cancelled'`) == 1
	})
}

func TestEntryThatRunsOnAfterItsDeadlineIsReportedOnce(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(time.Hour)
	f.exec(`SELECT penstock.push('work', '1', finish_by => clock_timestamp() + interval '1 hour')`)
	f.claim(node)
	f.exec(`UPDATE penstock.entry SET finish_by = clock_timestamp() - interval '1 minute'`)
	out := &log{}
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: 10 * time.Millisecond, Log: slog.New(slog.NewTextHandler(out, nil)),
	})
	run(t, duty)
	eventually(t, "it is reported", func() bool { return duty.Status().Overrun == 1 && out.contains("still runs after its deadline") })
	if f.count(heldLocks) != 1 || f.count(`SELECT count(*) FROM penstock.entry`) != 1 {
		t.Error("an entry that runs was taken from its node")
	}
}

// Late is of entries that came due alone: an entry that runs keeps deadlines that have passed.
func TestDeadlinesOfRunningEntriesAreNotLate(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(time.Hour)
	f.exec(`SELECT penstock.push('work', '1', start_by => now() + interval '1 hour', finish_by => now() + interval '1 hour')`)
	f.claim(node)
	f.exec(`UPDATE penstock.entry SET start_by = now() - interval '10 minutes', finish_by = now() - interval '1 minute'`)
	f.exec(`SELECT penstock.push('work', '2', due_at => now() + interval '1 hour')`)
	f.exec(`UPDATE penstock.entry SET due_at = now() - interval '1 hour' WHERE status = 'initial'`)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if _, err := tx.Exec(t.Context(), `SELECT FROM penstock.entry WHERE status = 'initial' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond})
	run(t, duty)
	eventually(t, "the entry that is due is late", func() bool { return duty.Status().Late >= time.Hour })
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the entry is promoted", func() bool { return duty.Status().Promoted == 1 })
	eventually(t, "nothing is late", func() bool { return duty.Status().Late == 0 })
	if f.count(heldLocks) != 1 {
		t.Error("the entry that runs was taken from its node")
	}
}

// A queue that is dropped while a pass waits for its table is no error: the leader had logged one.
func TestAQueueThatIsDroppedMeanwhileIsNoError(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('other')`)
	f.push(3, "")
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if _, err := tx.Exec(t.Context(), `SELECT penstock.drop_queue('work', true)`); err != nil {
		t.Fatal(err)
	}
	out := &log{}
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: 10 * time.Millisecond, Log: slog.New(slog.NewTextHandler(out, nil)),
	})
	run(t, duty)
	eventually(t, "a pass waits for the table of the queue", func() bool {
		return f.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.exec(`SELECT penstock.push('other', '1', due_at => clock_timestamp() + interval '1 millisecond')`)
	eventually(t, "passes go on", func() bool { return duty.Status().Promoted == 1 })
	if duty.Status().Errors != 0 || out.contains("level=ERROR") {
		t.Errorf("%d errors were counted for the queue that was dropped", duty.Status().Errors)
	}
}

// Queues are read in parts, each under its own bound. A part that takes too long delays no other for ever.
func TestQueuesThatCannotBeReadInTimeHoldUpNoOthers(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('a_locked')`)
	f.exec(`SELECT penstock.push('work', '{}', due_at => clock_timestamp() + interval '1 millisecond')`)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if _, err := tx.Exec(t.Context(), `LOCK TABLE penstock.entry_a_locked`); err != nil {
		t.Fatal(err)
	}
	run(t, maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond, QueuesAtOnce: 1}))
	eventually(t, "the entry of the other queue is ready", func() bool {
		return f.count(`SELECT count(*) FROM penstock.ready`) == 1
	})
}

func TestBacklogOfDueEntriesIsPromotedInBatches(t *testing.T) {
	f := newUsualFleet(t)
	due := time.Now().Add(time.Hour)
	pushes := make([]invalidation.Push, 500)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(`{}`), DueAt: due}
	}
	if _, err := f.q.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	f.exec(`UPDATE penstock.entry SET due_at = clock_timestamp() - interval '1 minute'`)
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{BatchEntriesMax: 40, Pause: 10 * time.Millisecond})
	run(t, duty)
	eventually(t, "all are ready", func() bool { return f.count(`SELECT count(*) FROM penstock.ready`) == 500 })
	eventually(t, "all are counted", func() bool { return duty.Status().Promoted == 500 })
}

func TestQueueThatCannotBeServedHoldsUpNoOther(t *testing.T) {
	f := newUsualFleet(t)
	for _, name := range []string{"a_broken", "z_broken"} {
		if _, err := invalidation.Create(t.Context(), f.pool, name, invalidation.Config{}); err != nil {
			t.Fatal(err)
		}
	}
	f.exec(`ALTER TABLE penstock.entry_a_broken RENAME TO elsewhere`)
	f.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''refused''; END'`)
	f.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON penstock.entry_z_broken FOR EACH ROW EXECUTE FUNCTION refuse()`)
	for _, queue := range []string{"work", "z_broken"} {
		f.exec(`SELECT penstock.push($1, '{}', due_at => clock_timestamp() + interval '200 milliseconds')`, queue)
	}
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 20 * time.Millisecond, GiveUp: time.Second})
	run(t, duty)
	eventually(t, "the entry of the sound queue is ready", func() bool { return f.count(`SELECT count(*) FROM penstock.ready`) == 1 })
	eventually(t, "the broken queues are reported", func() bool { return duty.Status().Errors > 2 })
}
