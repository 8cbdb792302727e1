package cron

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The runs of two jobs with one lock key follow one another, each with its own payload.
func TestEntriesOfJobsAreNotMerged(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('reports', '{"mergeable": true}')`)
	for _, name := range []string{"a", "b"} {
		b.job(Job{
			Name: name, Schedule: Schedule{Spec: "@hourly"}, LockKey: "shared",
			Payload: json.RawMessage(`{"job": "` + name + `"}`),
		})
	}
	b.at(noon)
	b.at(noon.Add(time.Hour))
	if n := b.count(`SELECT penstock.compact('reports', 'shared')`); n != 0 {
		t.Errorf("%d entries of a job were merged into that of another one", n)
	}
	const ours = `SELECT count(*) FROM penstock.entry WHERE payload->>'job' = name AND status = 'pending'`
	if n := b.count(ours); n != 2 {
		t.Errorf("%d jobs have an entry with their payload, want 2", n)
	}
}

// failRun fails the run of a lock for good and lets the engine see it.
func (b *bed) failRun(l *invalidation.Lock) invalidation.EntryID {
	b.Helper()
	e := invalidation.Fail(l, l.Entries[0].ID, invalidation.Failure{Error: "no"}, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		b.Fatal(err)
	}
	b.at(b.now)
	return l.Entries[0].ID
}

// retry retries a failed run, as of the test's clock.
func (b *bed) retry(failed invalidation.EntryID) {
	b.Helper()
	b.exec(`SELECT penstock.retry_failure($1)`, failed)
	b.exec(`UPDATE penstock.cron_job SET catching_up_to = $1
	         WHERE entry_id = $2 AND catching_up_to > fired_at - interval '1 minute'`, b.now, failed)
}

// A failed run that is retried is the run of its job again: the next nominal time overlaps with it.
func TestARetriedFailureIsTheRunOfItsJob(t *testing.T) {
	for overlap, c := range map[Overlap]struct {
		cancels int // requests while it runs
		next    time.Time
	}{
		OverlapSkip:   {0, noon.Add(3 * time.Hour)},
		OverlapQueue:  {0, noon.Add(2 * time.Hour)},
		OverlapCancel: {1, noon.Add(2 * time.Hour)},
	} {
		t.Run(string(overlap), func(t *testing.T) {
			b := newBed(t)
			b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}, Overlap: overlap})
			b.at(noon)
			b.at(noon.Add(time.Hour))
			failed := b.failRun(b.claim()[0])
			b.retry(failed)
			if state := b.state("hourly"); state != "running" {
				t.Errorf("the job is %s while its run is retried", state)
			}
			run := b.claim()
			if len(run) != 1 || run[0].Entries[0].ID != failed {
				t.Fatalf("claimed %v, want the retried run %d", run, failed)
			}
			b.at(noon.Add(2 * time.Hour))
			if n := len(b.claim()); n != 0 {
				t.Errorf("%d further runs beside the one that is retried", n)
			}
			if n := b.count(`SELECT count(*) FROM penstock.cancel_request WHERE entry_id = $1`, failed); n != c.cancels {
				t.Errorf("%d cancel requests for the run, want %d", n, c.cancels)
			}
			b.now = b.now.Add(time.Minute)
			b.finish(run)
			b.at(b.now)
			b.at(noon.Add(3 * time.Hour))
			if got := b.firings("hourly"); len(got) < 2 || !got[1].Equal(c.next) {
				t.Errorf("fired for %v, want the second for %s", got, c.next)
			}
		})
	}
}

// Without a further run there is nothing that a retried one could overlap with.
func TestARetriedLastRunIsNotCancelled(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly", End: noon.Add(90 * time.Minute)}, Overlap: OverlapCancel})
	b.at(noon)
	b.at(noon.Add(time.Hour))
	failed := b.failRun(b.claim()[0])
	b.at(noon.Add(2 * time.Hour))
	b.retry(failed)
	if run := b.claim(); len(run) != 1 || run[0].Entries[0].ID != failed {
		t.Fatalf("claimed %v, want the retried run %d", run, failed)
	}
	b.at(noon.Add(3 * time.Hour))
	if n := b.count(`SELECT count(*) FROM penstock.cancel_request`); n != 0 {
		t.Errorf("%d cancel requests for the last run of a job", n)
	}
}

// A bulk retry asks for each failure whether a run of its job is in progress: that must not lock the tables of all queues.
func TestWhetherAJobRunsIsReadFromItsQueueAlone(t *testing.T) {
	b := newBed(t)
	const queues = 20
	for i := range queues {
		b.exec(`SELECT penstock.create_queue($1)`, fmt.Sprint("queue", i))
	}
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.at(noon.Add(time.Hour))
	failed := b.failRun(b.claim()[0])
	b.at(noon.Add(2 * time.Hour))
	b.claim()
	tx, err := b.pool.Begin(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(b.ctx) }()
	var conflict string
	if err := tx.QueryRow(b.ctx, `SELECT penstock.retry_conflict($1, $2)`, b.q.ID, failed).Scan(&conflict); err != nil {
		t.Fatal(err)
	}
	var locks int
	const entryLocks = `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'penstock.entry%'`
	if err := tx.QueryRow(b.ctx, entryLocks).Scan(&locks); err != nil {
		t.Fatal(err)
	}
	if locks > queues || conflict == "" {
		t.Errorf("%d locks with %d queues to find %q", locks, queues, conflict)
	}
}

// While another run of the job goes on, a failed one is not retried beside it: one waits for the other, unless a lock key
// keeps them apart.
func TestAFailureIsNotRetriedBesideAnotherRunOfItsJob(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.at(noon.Add(time.Hour))
	failed := b.failRun(b.claim()[0])
	b.at(noon.Add(2 * time.Hour))
	other := b.claim()
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.retry_failure($1)`, failed)
	if postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), "runs already, as entry") {
		t.Errorf("retry beside a run: %v", err)
	}
	operation := b.count(`SELECT penstock.start_operation('reports', 'retry_failures', '{"name": "hourly"}')`)
	b.exec(`SELECT penstock.step_operation($1)`, operation)
	if n := len(b.claim()); n != 0 {
		t.Errorf("%d runs beside the one that goes on", n)
	}
	b.finish(other)
	b.at(b.now)
	b.exec(`SELECT penstock.step_operation($1)`, operation)
	if locks := b.claim(); len(locks) != 1 || locks[0].Entries[0].ID != failed {
		t.Errorf("claimed %v when the other run had ended, want the retried run %d", locks, failed)
	}
}

// A retry of a failure that the engine has not seen yet is not taken for the end of the run.
func TestAFailureIsRetriedBeforeTheEngineSeesIt(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.at(noon.Add(time.Hour))
	l := b.claim()[0]
	e := invalidation.Fail(l, l.Entries[0].ID, invalidation.Failure{Error: "no"}, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.exec(`SELECT penstock.retry_failure($1)`, e.Entry)
	b.at(noon.Add(2 * time.Hour))
	if n, state := len(b.claim()), b.state("hourly"); n != 1 || state != "running" {
		t.Errorf("%d runs of a job that is %s, want the retried one alone", n, state)
	}
}
