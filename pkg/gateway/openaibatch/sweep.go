package openaibatch

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// sweepBatchesSQL removes batches that ended long ago.
const sweepBatchesSQL = `
DELETE FROM penstock.gateway_batch b
 WHERE NOT ` + isOpen + `
   AND coalesce(b.completed_at, b.failed_at, b.expired_at, b.cancelled_at) < clock_timestamp() - interval '90 days'`

// sweepFilesSQL removes up to $1 files that were deleted, have expired or were never completed, and that no open batch
// needs. A file goes a minute after its end: a batch that was created of it at the last moment, in a transaction of at
// most 10 s (statementMax), is in the snapshot of the statement.
const sweepFilesSQL = `
DELETE FROM penstock.gateway_file
 WHERE id IN (
       SELECT f.id FROM penstock.gateway_file f
        WHERE (f.deleted_at < clock_timestamp() - interval '1 minute'
               OR f.expires_at < clock_timestamp() - interval '1 minute'
               OR (f.completed_at IS NULL AND f.created_at < clock_timestamp() - interval '1 day'))
          AND NOT EXISTS (SELECT FROM penstock.gateway_batch b
                           WHERE ` + isOpen + `
                             AND f.id IN (b.input_file_id, b.output_file_id, b.error_file_id))
        LIMIT $1
          FOR UPDATE SKIP LOCKED)`

// sweepAtOnce is how many files, of up to 200 MiB each, are removed in one transaction.
const sweepAtOnce = 10

// sweep removes old batches and expired files, unless they are so by a time that is not believed.
func (s *Batches) sweep(ctx context.Context) error {
	if _, err := s.delete(ctx, sweepBatchesSQL); err != nil {
		return fmt.Errorf("sweep batches: %w", err)
	}
	for {
		n, err := s.delete(ctx, sweepFilesSQL, sweepAtOnce)
		if err != nil {
			return fmt.Errorf("sweep files: %w", err)
		}
		if n < sweepAtOnce {
			return nil
		}
	}
}

// delete deletes what is old by the database's clock, and returns how many rows.
func (s *Batches) delete(ctx context.Context, sql string, args ...any) (n int64, err error) {
	err = postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, sql, args...)
		if err != nil {
			return err
		}
		n = tag.RowsAffected()
		return s.clock.CheckTx(ctx, tx)
	})
	return n, err
}
