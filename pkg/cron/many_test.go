package cron

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// pushingFence is a fence that pushes a batch of entries to another queue after each transaction, and records what both
// took: whatever slows the machine down slows both down.
type pushingFence struct {
	open
	push          func() error
	fired, pushed time.Duration
	transactions  int
	rowsMax       int64 // the most rows that a transaction read
}

// rowsReadSQL counts the rows of tables that the session has read and not yet reported to the statistics.
// It reports none within a transaction.
const rowsReadSQL = `
SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint
  FROM pg_stat_xact_user_tables WHERE schemaname = 'penstock'`

func (f *pushingFence) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	f.transactions++
	began := time.Now()
	err := f.open.InTx(ctx, func(tx pgx.Tx) error {
		var before, after int64
		if err := tx.QueryRow(ctx, rowsReadSQL).Scan(&before); err != nil {
			return err
		}
		if err := fn(tx); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, rowsReadSQL).Scan(&after)
		f.rowsMax = max(f.rowsMax, after-before)
		return err
	})
	f.fired += time.Since(began)
	if err != nil {
		return err
	}
	began = time.Now()
	err = f.push()
	f.pushed += time.Since(began)
	return err
}

// Jobs that are due at the same time are fired in full batches, each of which reads a few rows for each of its jobs,
// however many are due, and takes a few times as long as a push of as many entries. CRON_JOBS=100000 measures a hundred
// thousand.
func TestTimedManyDueJobsFireInBatchesThatCostAFewPushes(t *testing.T) {
	const (
		batch   = 2000
		rowsMax = 20 // for a job; 16 are read. A batch that read all due jobs would read 10 more
		timeMax = 15 // times that of a push; 6 to 7 are measured, beside other work as well
	)
	jobs := 10 * batch
	if text := os.Getenv("CRON_JOBS"); text != "" {
		var err error
		if jobs, err = strconv.Atoi(text); err != nil {
			t.Fatalf("read CRON_JOBS: %v", err)
		}
	}
	b := newBed(t)
	b.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, handled_at)
	        SELECT $1, 'job ' || i, '0 13 * * *', $2 FROM generate_series(1, $3) i`, b.q.ID, noon, jobs)
	b.at(noon)
	b.now = noon.Add(time.Hour)
	other, err := invalidation.Create(b.ctx, b.pool, "other", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	entries := make([]invalidation.Push, batch)
	for i := range entries {
		entries[i].Payload = json.RawMessage(`{}`)
	}
	fence := &pushingFence{open: open{b.pool}, push: func() error {
		_, err := other.Push(b.ctx, entries...)
		return err
	}}
	e := b.newEngine(fence) // a fresh leader: nothing is cached
	e.cfg.BatchJobsMax = batch
	e.batchTime = time.Minute // a batch that takes longer makes the next ones smaller
	if err := e.fireDue(b.ctx); err != nil {
		t.Fatal(err)
	}
	perJob, ratio := float64(fence.rowsMax)/batch, fence.fired.Seconds()/fence.pushed.Seconds()
	t.Logf("%d jobs fired in %v and %d transactions, %.2f times the time of pushes of as many entries; %.1f rows read for a job",
		jobs, fence.fired.Round(time.Millisecond), fence.transactions, ratio, perJob)
	if want := jobs/batch + 1; fence.transactions != want {
		t.Errorf("%d transactions, want %d: full batches, and one that finds nothing", fence.transactions, want)
	}
	if perJob > rowsMax {
		t.Errorf("a batch read %.1f rows for each of its jobs, want %d at most", perJob, rowsMax)
	}
	if ratio > timeMax {
		t.Errorf("firing took %.2f times what pushes of as many entries took, want %d at most", ratio, timeMax)
	}
	for contents, sql := range map[string]string{
		"firings": `SELECT count(*) FROM penstock.cron_firing`,
		"jobs":    `SELECT count(DISTINCT job_id) FROM penstock.cron_firing`,
		"ready":   `SELECT count(*) FROM penstock.ready JOIN penstock.queue q ON q.id = queue_id WHERE q.name = 'reports'`,
		"pending": `SELECT count(*) FROM penstock.entry_reports WHERE status = 'pending'`,
	} {
		if n := b.count(sql); n != jobs {
			t.Errorf("%s: %d, want %d", contents, n, jobs)
		}
	}
}
