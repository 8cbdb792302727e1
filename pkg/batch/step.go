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

// Bounds of a pass, so that neither its statements nor a term of the leader grow with the number of batches and parts.
const (
	passBatches  = 100    // that a pass reads; it begins behind those of the pass before
	clearedParts = 10_000 // that are deleted at once
)

// Stepper is the duty of the elected leader that pushes the parts of batches and completes batches.
type Stepper struct {
	cfg     Config
	db      postgres.DB
	fence   duty.Fence
	after   int64 // the last batch of the pass before; 0: begin anew
	busy    bool  // a pass since then found something to do
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
		err := s.pass(ctx)
		switch {
		case err != nil:
			return s.cfg.Pause, err
		case s.after > 0:
			return 0, nil // there are more batches
		case !s.busy:
			return s.cfg.Pause, nil
		}
		// Parts are short: keep the window full.
		return min(s.cfg.Pause, max(50*time.Millisecond, time.Since(start))), nil
	})
}

// pageSQL reads the next $2 open batches behind $1, and whether a step may change them: not those whose first or last
// entry is still there, and not those that are paused and have no part in the queue. step_batch decides under the lock
// of the batch.
const pageSQL = `
SELECT b.id, b.queue_id,
       CASE b.status
       WHEN 'splitting' THEN NOT EXISTS (
            SELECT FROM penstock.entry e WHERE e.queue_id = b.queue_id AND e.id = b.split_entry_id)
       WHEN 'ending' THEN NOT EXISTS (
            SELECT FROM penstock.entry e WHERE e.queue_id = b.completion_queue_id AND e.id = b.completion_entry_id)
       ELSE b.paused_at IS NULL OR b.cancelled_by IS NOT NULL OR NOT penstock.paused_until(b.paused_until)
            OR EXISTS (SELECT FROM penstock.batch_part p
                        WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL)
            OR NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL)
       END AS due
  FROM (SELECT o.id, o.queue_id, o.status, o.split_entry_id, o.completion_queue_id, o.completion_entry_id, o.paused_at,
               o.paused_until, o.cancelled_by
          FROM penstock.batch o WHERE o.ended_at IS NULL AND o.id > $1 ORDER BY o.id LIMIT $2) b
 ORDER BY b.id`

// pass steps the due batches among the next ones, each in a transaction of its own: an error in one does not delay the
// others.
func (s *Stepper) pass(ctx context.Context) error {
	type batch struct {
		ID    int64
		Queue int32
		Due   bool
	}
	rows := postgres.Query(ctx, s.db, pageSQL, s.after, passBatches)
	batches, err := pgx.CollectRows(rows, pgx.RowToStructByPos[batch])
	if err != nil {
		return fmt.Errorf("list batches: %w", err)
	}
	if s.after == 0 {
		s.busy = false
	}
	for _, b := range batches {
		if !b.Due {
			continue
		}
		var n int
		err := s.fence.InTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT penstock.step_batch($1)`, b.ID).Scan(&n)
		})
		if err != nil && postgres.Code(err) == "" {
			return fmt.Errorf("step batch %d: %w", b.ID, err) // the term or the database is away
		}
		if err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot step batch; the next pass tries again", "batch", b.ID, "error", err)
		}
		if n > 0 {
			s.busy = true
			s.cfg.Hint(b.Queue)
		}
	}
	s.after = 0
	if len(batches) == passBatches {
		s.after = batches[passBatches-1].ID
	}
	return s.clear(ctx)
}

// clearPartsSQL deletes up to $2 parts, the first ones of their batches, of ten batches that ended longer than $1 ago.
const clearPartsSQL = `
WITH old AS MATERIALIZED (
    SELECT id FROM penstock.batch
     WHERE ended_at < clock_timestamp() - $1::interval ORDER BY ended_at LIMIT 10 FOR UPDATE SKIP LOCKED
), first AS MATERIALIZED (
    SELECT p.batch_id, p.no
      FROM old JOIN penstock.batch_part p ON p.batch_id = old.id
     ORDER BY p.batch_id, p.no LIMIT $2
)
DELETE FROM penstock.batch_part p USING first f WHERE p.batch_id = f.batch_id AND p.no = f.no`

const clearSQL = `
DELETE FROM penstock.batch b
 WHERE b.id = ANY (ARRAY(SELECT id FROM penstock.batch
                          WHERE ended_at < clock_timestamp() - $1::interval ORDER BY ended_at LIMIT 10))
   AND NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id)`

// clear deletes ended batches once a minute, or at once where more parts are left than are deleted in one transaction.
func (s *Stepper) clear(ctx context.Context) error {
	if time.Since(s.cleared) <= time.Minute {
		return nil
	}
	return s.fence.InTx(ctx, func(tx pgx.Tx) error {
		parts, err := tx.Exec(ctx, clearPartsSQL, s.cfg.Retention, clearedParts)
		if err != nil {
			return fmt.Errorf("delete parts of ended batches: %w", err)
		}
		if parts.RowsAffected() < clearedParts {
			s.cleared = time.Now()
		}
		if _, err := tx.Exec(ctx, clearSQL, s.cfg.Retention); err != nil {
			return fmt.Errorf("delete ended batches: %w", err)
		}
		return nil
	})
}
