package cron

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}})
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
	if n := b.engine.Status().Fired; n != 1 {
		t.Errorf("%d jobs were fired once the entry was free", n)
	}
}
