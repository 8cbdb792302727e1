package batch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets how often the duty runs a pass. Its zero value means the defaults.
type Config struct {
	Pause time.Duration // between two passes: 500 ms
	// Hint is called with a queue after entries of it became ready. It must not block. Default: no
	// call.
	Hint  func(queue int32)
	Log   *slog.Logger // nowhere
	Clock *duty.Clock  // judges the database's clock for deletions, across terms; one for this term
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), 500*time.Millisecond)
	if c.Hint == nil {
		c.Hint = func(int32) {}
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Clock == nil {
		c.Clock = &duty.Clock{}
	}
	return c
}

// retention is how long ended batches and the results of their parts are kept.
const retention = 30 * 24 * time.Hour

// Bounds of a pass, so that neither its statements nor a term of the leader grow with the number of batches and parts.
const (
	passBatches  = 100    // that a pass reads; it begins behind those of the pass before
	clearedFirst = 500    // parts that are deleted in the first transaction that deletes
	clearedMax   = 10_000 // and in any

	clearTime = 200 * time.Millisecond // that one takes; steps wait for it
)

// Stepper is the duty of the elected leader that pushes the parts of batches and completes batches.
type Stepper struct {
	cfg   Config
	db    postgres.DB
	fence duty.Fence
	after int64 // the last batch of the pass before; 0: begin anew
	busy  bool  // a pass since then found something to do

	failing duty.FailingEach

	rows       duty.Limit // of a transaction that deletes
	clearAfter time.Time
}

// NewStepper returns the duty for one term. It reads through db and writes through fence.
func NewStepper(db postgres.DB, fence duty.Fence, cfg Config) *Stepper {
	return &Stepper{
		cfg: cfg.withDefaults(), db: db, fence: fence,
		rows: duty.Limit{First: clearedFirst, Max: clearedMax, Aim: clearTime},
	}
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
       WHEN 'splitting' THEN NOT penstock.entry_lives(b.queue_id, b.split_entry_id)
       WHEN 'ending' THEN NOT penstock.entry_lives(b.completion_queue_id, b.completion_entry_id)
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
		s.failing.Note(ctx, s.cfg.Log, slog.LevelError, "step a batch", strconv.FormatInt(b.ID, 10), err, "batch", b.ID)
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

// clearPartsSQL deletes up to $2 parts of batches that ended before $1, of each batch the first ones.
const clearPartsSQL = `
WITH old AS MATERIALIZED (
    SELECT id FROM penstock.batch WHERE ended_at < $1 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED
), first AS MATERIALIZED (
    SELECT p.at
      FROM old CROSS JOIN LATERAL (
           SELECT ctid AS at FROM penstock.batch_part WHERE batch_id = old.id ORDER BY no LIMIT $2) p
     LIMIT $2
)
DELETE FROM penstock.batch_part WHERE ctid = ANY (ARRAY(SELECT at FROM first))`

// clearSQL deletes up to $2 batches that ended before $1 and have no parts any more.
const clearSQL = `
WITH old AS MATERIALIZED (
    SELECT id FROM penstock.batch WHERE ended_at < $1 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED
)
DELETE FROM penstock.batch
 WHERE id = ANY (ARRAY(SELECT id FROM old
                        WHERE NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = old.id)))`

// clear deletes ended batches once a minute. Where some are left it goes on soon, in a fifth of the time. A deletion
// that the database refuses is logged: it keeps no batch from its steps.
func (s *Stepper) clear(ctx context.Context) error {
	start := time.Now()
	if start.Before(s.clearAfter) {
		return nil
	}
	more := false
	err := s.fence.InTx(ctx, func(tx pgx.Tx) (err error) {
		more, err = s.clearSome(ctx, tx, s.rows.Rows())
		return err
	})
	took := time.Since(start)
	if more || err != nil { // few rows say nothing about a full transaction
		s.rows.Done(took, err)
	}
	s.clearAfter = time.Now().Add(time.Minute)
	if more || duty.Late(err) {
		s.clearAfter = time.Now().Add(min(4*took, time.Minute))
	}
	if err != nil && postgres.Code(err) == "" && !errors.Is(err, duty.ErrClock) {
		return err
	}
	s.failing.Note(ctx, s.cfg.Log, slog.LevelWarn, "delete ended batches", "delete", err)
	return nil
}

// clearSome deletes up to so many parts and batches, and reports whether there may be more.
func (s *Stepper) clearSome(ctx context.Context, tx pgx.Tx, most int) (more bool, err error) {
	var now time.Time
	if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return false, fmt.Errorf("read the clock: %w", err)
	}
	if err := s.cfg.Clock.Check(now); err != nil {
		return false, err
	}
	for _, one := range []struct{ rows, sql string }{
		{"parts of ended batches", clearPartsSQL}, {"ended batches", clearSQL},
	} {
		gone, err := tx.Exec(ctx, one.sql, now.Add(-retention), most)
		if err != nil {
			return false, fmt.Errorf("delete %s: %w", one.rows, err)
		}
		more = more || gone.RowsAffected() >= int64(most)
	}
	return more, nil
}
