package cron

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
)

// begin returns a transaction that is undone at the end of the test.
func (b *bed) begin() pgx.Tx {
	b.Helper()
	tx, err := b.pool.Begin(b.ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = tx.Rollback(b.ctx) })
	return tx
}

// overlapping makes jobs of every minute whose runs have begun, and are to be cancelled a minute later.
func (b *bed) overlapping(jobs ...Job) {
	b.Helper()
	for _, j := range jobs {
		j.Schedule = Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}
		j.Overlap = OverlapCancel
		b.job(j)
	}
	b.at(noon)
	b.at(noon.Add(time.Minute))
	if n := len(b.claim()); n != len(jobs) {
		b.Fatalf("%d of %d runs began", n, len(jobs))
	}
}

const requestedSQL = `SELECT count(*) FROM penstock.cancel_request`

// A session that keeps a lock key does not keep the runs under it from being cancelled.
func TestARunIsCancelledAlthoughItsKeyIsKept(t *testing.T) {
	b := newBed(t)
	b.overlapping(Job{Name: "keyed", LockKey: "K"}, Job{Name: "other"})
	if _, err := b.begin().Exec(b.ctx, `SELECT penstock.exclude_claims($1, 'K')`, b.q.ID); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(2 * time.Minute))
	if n := b.count(requestedSQL); n != 2 {
		t.Errorf("the cancel of %d of 2 runs is requested", n)
	}
}

// A run that another transaction cancels is left for a second later, and keeps no other job from its turn.
func TestARunThatIsBeingCancelledKeepsNoOtherJob(t *testing.T) {
	b := newBed(t)
	b.overlapping(Job{Name: "kept"}, Job{Name: "other"})
	tx := b.begin()
	if _, err := tx.Exec(b.ctx, `SELECT penstock.cancel_entry(entry_id) FROM penstock.cron_job WHERE name = 'kept'`); err != nil {
		t.Fatal(err)
	}
	b.exec(`UPDATE penstock.cron_job SET following_at = following_at - interval '1 second' WHERE name = 'kept'`)
	b.at(noon.Add(2 * time.Minute))
	b.at(noon.Add(2*time.Minute + time.Millisecond)) // the wait for the first ends a batch
	if n := b.count(requestedSQL); n != 1 {
		t.Errorf("the cancel of %d runs is requested beside the one in progress", n)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(2*time.Minute + 2*time.Second))
	if n := b.count(requestedSQL); n != 2 {
		t.Errorf("the cancel of %d of 2 runs is requested", n)
	}
}

// Guard: each. A pass ends although a full batch of due jobs cannot be fired now.
func TestAPassEndsThoughAllDueEntriesAreLocked(t *testing.T) {
	b := newBed(t)
	b.engine.cfg.BatchJobsMax = 1
	for _, name := range []string{"one", "two", "three"} { // more than twice those of a batch
		b.job(Job{Name: name, Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}})
	}
	b.at(noon)
	tx := b.begin()
	if _, err := tx.Exec(b.ctx, `SELECT FROM penstock.entry FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(time.Minute))
	if n := b.engine.Status().Fired; n != 0 {
		t.Errorf("%d jobs were fired", n)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(time.Minute + time.Second))
	if n := b.engine.Status().Fired; n != 3 {
		t.Errorf("%d jobs were fired once the entries were free, want 3", n)
	}
}

// One entry that another transaction had locked ended the pass after the batch with its job. With as many as fit in a
// batch, the jobs that are due after them were never fired.
func TestAJobThatCannotBeFiredKeepsNoOtherJob(t *testing.T) {
	b := newBed(t)
	b.engine.cfg.BatchJobsMax = 2
	every := Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}
	for _, name := range []string{"locked 1", "locked 2", "other 1", "other 2", "other 3"} {
		b.job(Job{Name: name, Schedule: every})
	}
	b.at(noon)
	b.exec(`UPDATE penstock.cron_job SET due_at = due_at - interval '1 second' WHERE name LIKE 'locked%'`) // they come first
	tx := b.begin()
	if _, err := tx.Exec(b.ctx, `SELECT FROM penstock.entry WHERE name LIKE 'locked%' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(time.Minute))
	if n := b.engine.Status().Fired; n != 3 {
		t.Errorf("%d jobs were fired, want the three whose entries are not locked", n)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(time.Minute + time.Second))
	if n := b.engine.Status().Fired; n != 5 {
		t.Errorf("%d jobs were fired once the entries were free", n)
	}
}

// An entry that is changed between the snapshot of a statement and its lock is locked in its new version, where it has
// another ctid. The job was fired, and its entry stayed initial for ever.
func TestAJobIsFiredTogetherWithAnEntryThatChangesMeanwhile(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "changes", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}})
	b.at(noon)
	// The statement that locks waits after it has read the entry.
	b.exec(`DO $do$
	DECLARE
	    text text := pg_get_functiondef('penstock.fire_cron_jobs'::regproc);
	    lock text := 'x.id = j.entry_id FOR UPDATE SKIP LOCKED';
	BEGIN
	    ASSERT strpos(text, lock) > 0;
	    EXECUTE replace(text, lock, replace(lock, 'FOR', 'AND pg_advisory_xact_lock_shared(7) IS NOT NULL FOR'));
	END $do$`)
	tx := b.begin()
	if _, err := tx.Exec(b.ctx, `SELECT pg_advisory_xact_lock(7)`); err != nil {
		t.Fatal(err)
	}
	passed := make(chan error, 1)
	b.now = noon.Add(time.Minute)
	go func() {
		_, err := b.engine.pass(b.ctx)
		passed <- err
	}()
	for b.count(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 7`) == 0 {
		time.Sleep(time.Millisecond)
	}
	b.exec(`SELECT penstock.disable_entry(id, 'r', 'a') FROM penstock.entry`)
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-passed; err != nil {
		t.Fatal(err)
	}
	b.exec(`SELECT penstock.enable_entry(id, 'r', 'a') FROM penstock.entry`)
	b.at(b.now.Add(time.Second))
	if n, claimed := b.engine.Status().Fired, len(b.claim()); n != 1 || claimed != 1 {
		t.Errorf("%d jobs were fired, and %d runs began", n, claimed)
	}
}

// Waiting entries that another transaction has locked are moved to another nominal time, or withdrawn, by a later pass. A
// pass that waited for them kept every job from its turn, and the leader resigned in the end.
func TestAJobThatCannotBeMovedKeepsNoOtherJob(t *testing.T) {
	b := newBed(t)
	var cancel context.CancelFunc
	b.ctx, cancel = context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	b.engine.cfg.BatchJobsMax = 2 // as many as cannot be moved
	hourly := Schedule{Spec: "0 * * * *", CatchUp: CatchUpNone}
	ends := hourly
	ends.End = noon.Add(90 * time.Minute)
	b.job(Job{Name: "moves", Schedule: hourly})
	b.job(Job{Name: "ends", Schedule: ends})
	b.job(Job{Name: "other", Schedule: Schedule{Spec: "0 * * * *", CatchUp: CatchUpLast}})
	b.at(noon)
	const waiting = `SELECT count(*) FROM penstock.cron_job j JOIN penstock.entry e ON e.id = j.entry_id
	                  WHERE j.name = $1 AND j.nominal_at = $2`
	b.exec(`UPDATE penstock.cron_job SET due_at = due_at - interval '1 second' WHERE name = 'other'`) // its turn is first
	tx := b.begin()
	if _, err := tx.Exec(b.ctx, `SELECT FROM penstock.entry WHERE name <> 'other' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	late := noon.Add(time.Hour + 40*time.Minute) // 13:00 was missed by more than the grace
	for range 2 {
		b.at(late)
	}
	if n := len(b.firings("other")); n != 1 {
		t.Errorf("the other job was fired %d times", n)
	}
	for _, name := range []string{"moves", "ends"} {
		if b.count(waiting, name, noon.Add(time.Hour)) != 1 {
			t.Errorf("the entry of %q was moved although it is locked", name)
		}
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.at(late)
	if b.count(waiting, "moves", noon.Add(2*time.Hour)) != 1 {
		t.Error("the job has no entry for the next hour")
	}
	if n := b.count(`SELECT count(*) FROM penstock.cron_job WHERE name = 'ends' AND entry_id IS NULL`); n != 1 {
		t.Error("the job whose schedule has ended has an entry")
	}
}

// Guard: each. A batch that its deadline has ended is tried with fewer jobs, down to one.
func TestABatchThatTakesTooLongIsTriedWithFewerJobs(t *testing.T) {
	for _, most := range []int{7, 1, 0} {
		t.Run(strconv.Itoa(most), func(t *testing.T) {
			b := newBed(t)
			b.engine.cfg.BatchJobsMax = 30
			b.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, handled_at)
			        SELECT $1, 'job ' || i, '* * * * *', $2 FROM generate_series(1, 20) i`, b.q.ID, noon)
			b.at(noon)
			b.exec(fmt.Sprintf(`
			    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
			    BEGIN
			        IF (SELECT count(*) FROM added) > %d THEN
			            RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
			        END IF;
			        RETURN NULL;
			    END $$;
			    CREATE TRIGGER slow AFTER INSERT ON penstock.cron_firing REFERENCING NEW TABLE AS added
			        FOR EACH STATEMENT EXECUTE FUNCTION slow()`, most))
			b.now = noon.Add(time.Minute)
			_, err := b.engine.pass(b.ctx)
			n := b.count(`SELECT count(*) FROM penstock.cron_firing`)
			if most == 0 && !duty.Late(err) {
				t.Errorf("not even one job can be fired: %v", err)
			}
			if most > 0 && (err != nil || n != 20) {
				t.Errorf("%d jobs were fired, want 20: %v", n, err)
			}
		})
	}
}

// A transaction whose commit fails is made again by the next pass: what it did is counted once.
func TestWhatWasNotCommittedIsNotCounted(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "one", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}})
	b.at(noon)
	b.now = noon.Add(time.Minute)
	e := b.newEngine(&cut{open: open{b.pool}})
	if _, err := e.pass(b.ctx); !errors.Is(err, errTermOver) {
		t.Errorf("a pass that may not commit: %v", err)
	}
	if n := e.Status().Fired; n != 0 {
		t.Errorf("%d firings are counted that were not committed", n)
	}
	e.fence = open{b.pool}
	if _, err := e.pass(b.ctx); err != nil {
		t.Fatal(err)
	}
	if n := e.Status().Fired; n != 1 {
		t.Errorf("%d firings are counted, want 1", n)
	}
}
