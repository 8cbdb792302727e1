package openaibatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// nextSQL locks the open batch that has waited longest for a turn.
const nextSQL = `SELECT` + batchColumns + `
  FROM penstock.gateway_batch b
 WHERE b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND b.next_at <= clock_timestamp()
 ORDER BY b.next_at
 LIMIT 1
   FOR UPDATE OF b SKIP LOCKED`

// restSQL says when a batch gets its next turn.
const restSQL = `UPDATE penstock.gateway_batch SET next_at = clock_timestamp() + $2::interval WHERE id = $1`

// Times of turns.
const (
	turnMax    = 2 * time.Minute
	turnFailed = 5 * time.Second // until a batch whose turn failed gets another
	sweepEvery = 10 * time.Minute
)

func (s *Batches) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run takes turns at open batches until ctx ends.
func (s *Batches) Run(ctx context.Context) error {
	ticks := time.NewTicker(s.config.Every)
	defer ticks.Stop()
	swept := time.Now()
	for {
		for s.turn(ctx) {
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			if _, err := s.db.Exec(ctx, sweepSQL); err != nil && ctx.Err() == nil {
				s.log.Warn("sweep files", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		case <-s.wake:
		}
	}
}

// turn works on one batch. It is false if none was due or the database failed.
func (s *Batches) turn(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, turnMax)
	defer cancel()
	id := ""
	err := postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		b, err := oneBatch(postgres.Query(ctx, tx, nextSQL))
		if err != nil {
			return err
		}
		id = b.ID
		moved, err := s.step(ctx, tx, &b)
		if err != nil {
			return err
		}
		pause := s.config.Every
		if moved {
			pause = 0
		}
		_, err = tx.Exec(ctx, restSQL, b.ID, pause)
		return err
	})
	if err == nil {
		return true
	}
	if errors.Is(err, errNoBatch) || ctx.Err() != nil {
		return false
	}
	s.log.Warn("work on batch", "batch", id, "error", err)
	if id != "" { // the others must not wait for it
		_, err = s.db.Exec(ctx, restSQL, id, turnFailed)
	}
	return id != "" && err == nil
}

// step does what is next for a batch. moved says whether something was done.
func (s *Batches) step(ctx context.Context, tx pgx.Tx, b *batchRow) (moved bool, err error) {
	if b.Status == validating {
		return true, s.validate(ctx, tx, b)
	}
	stopped := b.Status == cancelling
	if stopped {
		if moved, err = s.cancelEntries(ctx, tx, b); err != nil {
			return false, err
		}
	}
	collected, err := s.collect(ctx, tx, b)
	if err != nil {
		return false, err
	}
	late := !stopped && !time.Now().Before(b.ExpiresAt)
	var advanced int
	switch {
	case stopped:
		advanced, err = s.giveUp(ctx, tx, b, "batch_cancelled", "the batch was cancelled before the request began")
	case late:
		advanced, err = s.giveUp(ctx, tx, b, codeExpired, expiredMessage)
	default:
		advanced, err = s.feed(ctx, tx, b)
	}
	if err != nil {
		return false, err
	}
	if collected+advanced > 0 {
		return true, nil
	}
	return moved, s.finishIfEmpty(ctx, tx, b, stopped)
}

// cancelEntriesMost is how many entries of a batch are cancelled in one turn.
const cancelEntriesMost = 500

const cancelEntriesSQL = `SELECT penstock.cancel_batch_lines($1, $2)`

func (s *Batches) cancelEntries(ctx context.Context, tx pgx.Tx, b *batchRow) (moved bool, err error) {
	var n int
	if err := tx.QueryRow(ctx, cancelEntriesSQL, b.ID, cancelEntriesMost).Scan(&n); err != nil {
		return false, fmt.Errorf("cancel entries of batch %s: %w", b.ID, err)
	}
	return n > 0, nil
}
