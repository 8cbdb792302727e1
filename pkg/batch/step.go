package batch

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets how often the duty runs a pass. Its zero value means the defaults.
type Config struct {
	Pause     time.Duration // between two passes: 500 ms
	Retention time.Duration // of ended batches and their part results: 30 days
	// Hint is called with a queue after entries of it became ready. It must not block. Default: no
	// call.
	Hint func(queue int32)
	Log  *slog.Logger // nowhere
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), 500*time.Millisecond)
	c.Retention = cmp.Or(max(c.Retention, 0), 30*24*time.Hour)
	if c.Hint == nil {
		c.Hint = func(int32) {}
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c
}

// Stepper is the duty of the elected leader that pushes the parts of batches and completes batches.
type Stepper struct {
	cfg     Config
	db      postgres.DB
	fence   duty.Fence
	cleared time.Time
}

// NewStepper returns the duty for one term. It reads through db and writes through fence.
func NewStepper(db postgres.DB, fence duty.Fence, cfg Config) *Stepper {
	return &Stepper{cfg: cfg.withDefaults(), db: db, fence: fence}
}

// Run steps batches until ctx ends. It returns an error when passes go on failing, see duty.Loop.
func (s *Stepper) Run(ctx context.Context) error {
	l := duty.Loop{Name: "batches", Pause: s.cfg.Pause, Log: s.cfg.Log}
	return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		if busy, err := s.pass(ctx); !busy || err != nil {
			return s.cfg.Pause, err
		}
		return min(s.cfg.Pause, max(50*time.Millisecond, time.Since(start))),
			nil // parts are short: keep the window full
	})
}

// dueSQL reads the batches that a step may change: not those whose first or last entry is still there, and not those
// that are paused and have no part in the queue. step_batch decides under the lock of the batch.
const dueSQL = `
SELECT b.id, b.queue_id
  FROM penstock.batch b
 WHERE b.ended_at IS NULL
   AND CASE b.status
       WHEN 'splitting' THEN NOT EXISTS (
            SELECT FROM penstock.entry e WHERE e.queue_id = b.queue_id AND e.id = b.split_entry_id)
       WHEN 'ending' THEN NOT EXISTS (
            SELECT FROM penstock.entry e WHERE e.queue_id = b.completion_queue_id AND e.id = b.completion_entry_id)
       ELSE b.paused_at IS NULL OR b.cancelled_by IS NOT NULL OR NOT penstock.paused_until(b.paused_until)
            OR EXISTS (SELECT FROM penstock.batch_part p
                        WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL)
            OR NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL)
       END
 ORDER BY b.id`

const clearSQL = `
DELETE FROM penstock.batch
 WHERE id = ANY (ARRAY(SELECT id FROM penstock.batch WHERE ended_at < clock_timestamp() - $1::interval ORDER BY ended_at LIMIT 10))`

// pass steps every batch that is due in a transaction of its own: an error in one does not delay the
// others.
func (s *Stepper) pass(ctx context.Context) (busy bool, err error) {
	type batch struct {
		ID    int64
		Queue int32
	}
	batches, err := pgx.CollectRows(postgres.Query(ctx, s.db, dueSQL), pgx.RowToStructByPos[batch])
	if err != nil {
		return false, fmt.Errorf("list batches: %w", err)
	}
	for _, b := range batches {
		var n int
		err := s.fence.InTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT penstock.step_batch($1)`, b.ID).Scan(&n)
		})
		if err != nil && postgres.Code(err) == "" {
			return false, fmt.Errorf("step batch %d: %w", b.ID, err) // the term or the database is away
		}
		if err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot step batch; the next pass tries again", "batch", b.ID, "error", err)
		}
		if n > 0 {
			busy = true
			s.cfg.Hint(b.Queue)
		}
	}
	if time.Since(s.cleared) > time.Minute {
		s.cleared = time.Now()
		err = s.fence.InTx(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, clearSQL, s.cfg.Retention)
			return err
		})
	}
	return busy, err
}
