package openaibatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// takeSQL takes the open batch that has waited longest for a turn. The turn counts as failed until it has ended, so
// that a batch whose turn ends the process waits longer for each further one: 5 s, then twice as long each, at most
// 5 min. A turn that is due after more than $1, longer than any pause, is from before the clock was set back.
const takeSQL = `
UPDATE penstock.gateway_batch
   SET next_at = clock_timestamp() + least(interval '5 s' * 2 ^ least(failed_turns, 10), interval '5 min'),
       failed_turns = failed_turns + 1
 WHERE id = (SELECT b.id FROM penstock.gateway_batch b
              WHERE ` + isOpen + `
                AND (b.next_at <= clock_timestamp() OR b.next_at > clock_timestamp() + $1::interval)
              ORDER BY b.next_at
              LIMIT 1
                FOR UPDATE SKIP LOCKED)
RETURNING id`

// takenSQL locks a batch that was taken. It may have ended: in a turn of another gateway, where this one came late.
const takenSQL = `SELECT` + batchColumns + `
  FROM penstock.gateway_batch b
 WHERE b.id = $1 AND ` + isOpen + `
   FOR UPDATE OF b`

// openSQL says whether there is an open batch.
const openSQL = `
SELECT EXISTS (SELECT FROM penstock.gateway_batch b
                WHERE ` + isOpen + `)`

// restSQL says when a batch gets its next turn, after one that did not fail: at once if it moved something ($2), but
// after $4 if its lines wait for the rate of a token. If it moved nothing, after $3, and twice as long for each
// further one in a row, at most 4 times.
const restSQL = `
UPDATE penstock.gateway_batch
   SET next_at = clock_timestamp() + CASE WHEN NOT $2 THEN $3::interval * 2 ^ least(idle_turns, 2)
                                          ELSE $4::interval END,
       idle_turns = CASE WHEN $2 THEN 0 ELSE least(idle_turns, 3) + 1 END, failed_turns = 0
 WHERE id = $1`

// failedTurnSQL begins the pause of a batch whose turn failed again, since the turn may have taken longer than it.
const failedTurnSQL = `
UPDATE penstock.gateway_batch
   SET next_at = clock_timestamp() + least(interval '5 s' * 2 ^ least(failed_turns - 1, 10), interval '5 min')
 WHERE id = $1`

// leaveSQL gives up a turn that ended with the program: it is no failure.
const leaveSQL = `
UPDATE penstock.gateway_batch SET next_at = clock_timestamp(), failed_turns = greatest(failed_turns - 1, 0)
 WHERE id = $1`

const (
	// failedTurnsMax is after how many failed turns in a row a batch that is not validated has failed: about 25 min.
	failedTurnsMax = 10
	pauseMax       = 6 * time.Minute // longer than any pause between two turns of a batch
	sweepEvery     = time.Minute
	idleEvery      = 5 * time.Second // between two readings whether a batch of another gateway is open
)

func (s *Batches) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run takes turns at open batches until ctx ends.
func (s *Batches) Run(ctx context.Context) error {
	swept := time.Now()
	for {
		pause := idleEvery
		if s.anyOpen(ctx) {
			for s.turn(ctx) {
			}
			pause = s.pause()
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			s.sweeping.Note(ctx, s.log, slog.LevelError, "sweep files and batches", s.sweep(ctx))
		}
		clock := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			clock.Stop()
			return nil
		case <-s.wake:
			clock.Stop()
		case <-clock.C:
		}
	}
}

// pause is for how long Run waits after a pass that found an open batch: until the first of those that wait for the
// rate of a token has rested.
func (s *Batches) pause() time.Duration {
	pause := cmp.Or(s.limited, workEvery)
	s.limited = 0
	return pause
}

// anyOpen says whether there is an open batch, or that is not known.
func (s *Batches) anyOpen(ctx context.Context) (open bool) {
	ctx, cancel := context.WithTimeout(ctx, statementMax)
	defer cancel()
	err := s.db.QueryRow(ctx, openSQL).Scan(&open)
	if err == nil && !open {
		s.taking.Note(ctx, s.log, slog.LevelError, takeStep, nil)
	}
	return open || err != nil
}

// takeStep is what fails and works again in the log.
const takeStep = "take a batch"

// turn works on one batch. It is false if none was due or the database failed.
func (s *Batches) turn(ctx context.Context) bool {
	id, err := s.take(ctx)
	none := errors.Is(err, pgx.ErrNoRows)
	if none {
		err = nil
	}
	s.taking.Note(ctx, s.log, slog.LevelError, takeStep, err)
	if none || err != nil || ctx.Err() != nil {
		return false
	}
	err = s.work(ctx, id)
	switch {
	case err == nil, errors.Is(err, errNoBatch):
		return true
	case ctx.Err() != nil:
		_ = s.end(ctx, leaveSQL, id) // without it the batch is due in 5 s
		return false
	}
	s.log.Error("work on batch", "batch", id, "error", err)
	return s.end(ctx, failedTurnSQL, id) == nil
}

// end ends a turn whose transaction left nothing, also where ctx has ended.
func (s *Batches) end(ctx context.Context, sql, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statementMax)
	defer cancel()
	_, err := s.db.Exec(ctx, sql, id)
	return err
}

// take begins a turn, pgx.ErrNoRows if no batch is due.
func (s *Batches) take(ctx context.Context) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementMax)
	defer cancel()
	err = s.db.QueryRow(ctx, takeSQL, pauseMax).Scan(&id)
	return id, err
}

// work works on a batch in one transaction, for at most turnMax.
func (s *Batches) work(ctx context.Context, id string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.turnMax)
	defer cancel()
	defer gateway.Recover(&err)
	var queue *int32 // that lines became entries of
	err = postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		b, err := oneBatch(postgres.Query(ctx, tx, takenSQL, id))
		if err != nil {
			return err
		}
		before := b.Fed
		moved, fault, err := s.step(ctx, tx, &b)
		if err != nil {
			return err
		}
		if fault != nil {
			s.log.Warn("feed batch", "batch", id, "error", fault)
			_, err = tx.Exec(ctx, failedTurnSQL, id)
			return err
		}
		if b.Fed > before {
			queue = b.QueueID
		}
		if moved && b.Limited > 0 {
			s.limited = min(cmp.Or(s.limited, b.Limited), b.Limited)
		}
		_, err = tx.Exec(ctx, restSQL, id, moved, workEvery, b.Limited)
		return err
	})
	if err == nil && queue != nil && s.config.Hint != nil {
		s.config.Hint(*queue)
	}
	return err
}

// step does what is next for a batch. moved says whether something was done. fault is an error of the lines that were
// to be pushed: what was collected before it stays. A batch of a client whose tokens have all ended is cancelled.
func (s *Batches) step(ctx context.Context, tx pgx.Tx, b *batchRow) (moved bool, fault, err error) {
	if b.Late || b.Revoked { // by the clock: what ends a batch ends it for good
		err := s.clock.CheckTx(ctx, tx)
		if errors.Is(err, duty.ErrClock) {
			return false, nil, nil // it waits until that is believed
		}
		if err != nil {
			return false, nil, err
		}
	}
	if b.Revoked && (b.Status == validating || b.Status == inProgress) {
		if *b, err = oneBatch(postgres.Query(ctx, tx, cancelSQL, b.ID, b.Owner)); err != nil {
			return false, nil, err
		}
	}
	if b.Status == validating {
		return true, nil, s.stepValidation(ctx, tx, b)
	}
	stopped := b.Status == cancelling
	if stopped {
		if moved, err = s.cancelEntries(ctx, tx, b); err != nil {
			return false, nil, err
		}
	}
	collected, err := s.collect(ctx, tx, b)
	if err != nil {
		return false, nil, err
	}
	var advanced int
	switch {
	case stopped:
		advanced, err = s.giveUp(ctx, tx, b, "batch_cancelled", "the batch was cancelled before the request began")
	case b.Late:
		advanced, err = s.giveUp(ctx, tx, b, codeExpired, expiredMessage)
	default:
		fault = pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) (err error) {
			advanced, err = s.feed(ctx, inner, b)
			return err
		})
	}
	if err != nil || fault != nil {
		return false, fault, err
	}
	if collected+advanced > 0 {
		return true, nil, nil
	}
	end := completed
	switch {
	case stopped:
		end = cancelled
	case b.ExpiredLines > 0:
		end = expired
	}
	return moved, nil, s.finishIfEmpty(ctx, tx, b, end)
}

// stepValidation validates a batch, or ends one whose window is over or that could not be validated.
func (s *Batches) stepValidation(ctx context.Context, tx pgx.Tx, b *batchRow) error {
	switch {
	case b.Late:
		return s.finishIfEmpty(ctx, tx, b, expired)
	case b.FailedTurns > failedTurnsMax:
		v := &validation{service: s, batch: b}
		v.flaws = append(v.flaws, flawOf("validation_failed", "input_file_id",
			"the file could not be validated: upload it again, and create another batch"))
		return v.fail(ctx, tx)
	}
	return s.validate(ctx, tx, b)
}

// cancelEntriesMax is how many entries of a batch are cancelled in one turn.
const cancelEntriesMax = 500

const cancelEntriesSQL = `SELECT penstock.cancel_batch_lines($1, $2)`

func (s *Batches) cancelEntries(ctx context.Context, tx pgx.Tx, b *batchRow) (moved bool, err error) {
	var n int
	if err := tx.QueryRow(ctx, cancelEntriesSQL, b.ID, cancelEntriesMax).Scan(&n); err != nil {
		return false, fmt.Errorf("cancel entries of batch %s: %w", b.ID, err)
	}
	return n > 0, nil
}
