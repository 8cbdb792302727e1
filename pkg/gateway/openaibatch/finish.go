package openaibatch

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// giveUp ends the next lines that were not pushed, with an error, and returns how many.
func (s *Batches) giveUp(ctx context.Context, tx pgx.Tx, b *batchRow, code, message string) (int, error) {
	lines, err := nextLines(ctx, tx, b, b.Total)
	if err != nil || len(lines) == 0 {
		return 0, err
	}
	var ended results
	for _, l := range lines {
		ended.fail(l.Line, l.CustomID, 0, code, message)
	}
	return len(lines), s.record(ctx, tx, b, &ended)
}

const openLinesSQL = `SELECT EXISTS (SELECT FROM penstock.gateway_batch_line WHERE batch_id = $1)`

const finishSQL = `
UPDATE penstock.gateway_batch
   SET status = $2, finalizing_at = CASE WHEN $2 = 'cancelled' THEN finalizing_at ELSE clock_timestamp() END,
       completed_at = CASE WHEN $2 = 'completed' THEN clock_timestamp() END,
       expired_at = CASE WHEN $2 = 'expired' THEN clock_timestamp() END,
       cancelled_at = CASE WHEN $2 = 'cancelled' THEN clock_timestamp() END
 WHERE id = $1`

// finishIfEmpty ends a batch of which no line is open, with a status.
func (s *Batches) finishIfEmpty(ctx context.Context, tx pgx.Tx, b *batchRow, end status) error {
	var open bool
	if err := tx.QueryRow(ctx, openLinesSQL, b.ID).Scan(&open); err != nil {
		return fmt.Errorf("read lines of batch %s: %w", b.ID, err)
	}
	if open {
		return nil
	}
	if _, err := tx.Exec(ctx, finishSQL, b.ID, end); err != nil {
		return fmt.Errorf("end batch %s: %w", b.ID, err)
	}
	return s.showOutputs(ctx, tx, b)
}

const sizeSQL = `SELECT bytes FROM penstock.gateway_file WHERE id = $1`

// fileSize returns the bytes of a file, also of one that was deleted and is still there.
func fileSize(ctx context.Context, db postgres.DB, id string) (bytes int64, err error) {
	err = db.QueryRow(ctx, sizeSQL, id).Scan(&bytes)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, errNoFile
	case err != nil:
		return 0, fmt.Errorf("read size of file %s: %w", id, err)
	}
	return bytes, nil
}

// showOutputs makes the files of a batch that has ended visible; empty ones go.
func (s *Batches) showOutputs(ctx context.Context, tx pgx.Tx, b *batchRow) error {
	kept := batchFileKept
	if b.OutputKept != nil {
		kept = *b.OutputKept
	}
	for id, name := range map[string]string{b.Output: "_output.jsonl", b.Errors: "_error.jsonl"} {
		bytes, err := fileSize(ctx, tx, id)
		if err != nil {
			return fmt.Errorf("batch %s: %w", b.ID, err)
		}
		if bytes == 0 {
			if err := dropFile(ctx, tx, id); err != nil {
				return err
			}
			continue
		}
		if _, err := completeFile(ctx, tx, id, purposeOutput, b.ID+name, kept); err != nil {
			return err
		}
	}
	return nil
}

// dropOutputs removes the files of a batch that has no answers.
func (s *Batches) dropOutputs(ctx context.Context, db postgres.DB, b *batchRow) error {
	if err := dropFile(ctx, db, b.Output); err != nil {
		return err
	}
	return dropFile(ctx, db, b.Errors)
}
