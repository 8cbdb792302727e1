package maintenance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Retention is the duty that creates and drops partitions: results and failures have one for each
// day, and a partition past its retention is dropped whole. It also deletes rows that no longer
// have a purpose.
type Retention struct {
	cfg   Config
	db    postgres.DB
	fence Fence

	tidier invalidation.Tidier
	whole  time.Time // when the last pass began that did all steps
	left   backlog   // of the pass that is in progress
	done   duty.Tally[RetentionStatus]
}

// RetentionStatus has the counters of the duty in this term.
type RetentionStatus struct {
	Made    int64         // partitions
	Dropped int64         // partitions
	Tidied  int64         // rows deleted one by one
	Behind  time.Duration // since the oldest partition that is left passed its retention; above a day, disk use grows
}

// NewRetention returns the duty for one term. It reads through db and writes through fence.
func NewRetention(db postgres.DB, fence Fence, cfg Config) *Retention {
	return &Retention{cfg: cfg.withDefaults(), db: db, fence: fence}
}

// inTerm runs a transaction that deletes what is too old by the database's clock. What was deleted by a time that is
// not believed is not committed.
func (r *Retention) inTerm(ctx context.Context, fn func(pgx.Tx) error) error {
	return inTerm(ctx, r.db, r.fence, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return r.cfg.Clock.CheckTx(ctx, tx)
	})
}

// Run creates and drops partitions until ctx ends.
func (r *Retention) Run(ctx context.Context) error { return r.cfg.loop("retention").Run(ctx, r.pass) }

// Status is safe to call at any time.
func (r *Retention) Status() RetentionStatus { return r.done.Read() }

const daysAhead = 7

// retentionStep is a part of a pass, with its name in the log.
type retentionStep struct {
	name string
	do   func(context.Context) error
}

// pass does its steps one after another. A step that the database refuses is logged, and the next pass tries it
// again: it would fail under another leader as well, and keeps no other step from its work. While rows are left to
// tidy, the next pass follows soon and does that alone: endings wait behind a partition that waits to be dropped.
// While the database's clock is not believed, a pass ends at its first step, and is no failure.
func (r *Retention) pass(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	r.left = backlog{}
	steps := []retentionStep{
		{"make partitions", r.make},
		{"drop old partitions", r.drop},
		{"look for what is behind", r.behind},
		{"prune the audit", r.pruneAudit},
		{"delete old outcomes", r.tidy},
	}
	if r.whole.IsZero() || start.Sub(r.whole) >= r.cfg.RetentionPause {
		r.whole = start
	} else {
		steps = steps[len(steps)-1:]
	}
	for _, step := range steps {
		err := step.do(ctx)
		if errors.Is(err, duty.ErrClock) {
			r.whole = time.Time{}
			r.cfg.Log.WarnContext(ctx, "retention waits until the database's clock is believed", "error", err)
			return r.cfg.RetentionPause, nil
		}
		if err := r.cfg.tolerate(ctx, err, step.name); err != nil {
			return 0, err
		}
		r.left.refused = r.left.refused || err != nil
	}
	return r.left.pause(time.Since(start), r.cfg.RetentionPause), nil
}

func (r *Retention) make(ctx context.Context) error {
	made, err := invalidation.EnsurePartitions(ctx, r.db, r.inTerm, daysAhead)
	r.done.Add(func(s *RetentionStatus) { s.Made += int64(made) })
	return err
}

func (r *Retention) drop(ctx context.Context) error {
	dropped, err := invalidation.DropOldPartitions(ctx, r.inTerm)
	r.done.Add(func(s *RetentionStatus) { s.Dropped += int64(dropped) })
	return err
}

// pruneAudit makes one step a pass: it needs minutes for a day's audit, which is soon enough.
func (r *Retention) pruneAudit(ctx context.Context) error {
	if r.cfg.AuditRetention == 0 {
		return nil
	}
	var gone int64
	err := r.inTerm(ctx, func(tx pgx.Tx) error {
		const sql = `SELECT penstock.prune_audit($1, $2)`
		return tx.QueryRow(ctx, sql, r.cfg.AuditRetention, tidyBatchRows).Scan(&gone)
	})
	if err != nil {
		return fmt.Errorf("prune the audit: %w", err)
	}
	r.done.Add(func(s *RetentionStatus) { s.Tidied += gone })
	return nil
}

const (
	// tidyBatchRows bounds the rows that one transaction deletes; of keys, the pages that it reads do.
	tidyBatchRows = 10_000
	// tidyPassMax and tidyTime bound the steps of one pass.
	tidyPassMax = 20
	tidyTime    = time.Second
)

// backlog is what a pass has left to tidy.
type backlog struct {
	more    bool // of some kind
	refused bool // the database refused a step of the pass
	deleted int  // rows
	steps   int
}

// tidy deletes rows in batches. The next pass goes on where this one ended.
func (r *Retention) tidy(ctx context.Context) error {
	r.tidier.Begin()
	var refused []error
	for start := time.Now(); ctx.Err() == nil; {
		tidied, more, err := r.tidier.Tidy(ctx, r.inTerm, tidyBatchRows)
		r.done.Add(func(s *RetentionStatus) { s.Tidied += int64(tidied.Total()) })
		if postgres.Unavailable(err) { // or the term is over, or the clock is not believed
			return err
		}
		refused = append(refused, err)
		r.left.more = more
		r.left.deleted += tidied.Total()
		r.left.steps++
		if !more || r.left.steps == tidyPassMax || time.Since(start) > tidyTime {
			break
		}
	}
	return errors.Join(refused...)
}

// pause is the time until the next pass, after one that took so long; usual is the time where nothing is left. Tidying
// uses about a fifth of the time while it deletes rows: under a bound in rows tables would grow without end where more
// rows come. It uses a twentieth while it reads much more than it deletes, less than a hundredth of a batch a step:
// large tables of rows that stay are read through within hours, and for little.
func (b backlog) pause(took, usual time.Duration) time.Duration {
	switch {
	case !b.more || b.refused:
		return usual
	case b.deleted < b.steps*tidyBatchRows/100:
		return min(19*took, usual)
	default:
		return min(4*took, usual)
	}
}

// behindSQL reads how long ago the oldest partition passed its retention, in seconds.
const behindSQL = `SELECT coalesce(extract(epoch FROM max(behind)), 0)::float8 FROM penstock.old_partitions`

func (r *Retention) behind(ctx context.Context) error {
	var behind float64
	if err := r.db.QueryRow(ctx, behindSQL).Scan(&behind); err != nil {
		return fmt.Errorf("find the oldest partition: %w", err)
	}
	r.done.Add(func(s *RetentionStatus) { s.Behind = max(0, seconds(behind)) })
	return nil
}
