package openaibatch

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// What an owner may have. Files that were deleted and are still there count, and so do the outputs of batches.
const (
	ownerBytesMax   = 16 << 30
	ownerFilesMax   = 10_000
	ownerBatchesMax = 1_000 // that have not ended
	// quotaStep is how many bytes of an upload are stored between two checks: uploads beside each other exceed
	// ownerBytesMax by at most this each, until they are refused.
	quotaStep = 16 << 20
)

// usedSQL is what an owner has.
const usedSQL = `
SELECT (SELECT coalesce(sum(f.bytes), 0)::bigint FROM penstock.gateway_file f WHERE f.owner = $1),
       (SELECT count(*) FROM penstock.gateway_file f WHERE f.owner = $1),
       (SELECT count(*) FROM penstock.gateway_batch b
         WHERE b.owner = $1 AND ` + isOpen + `)`

// used is what an owner has.
type used struct {
	bytes, files, batches int64
}

func usedBy(ctx context.Context, db postgres.DB, owner string) (u used, err error) {
	if err := db.QueryRow(ctx, usedSQL, owner).Scan(&u.bytes, &u.files, &u.batches); err != nil {
		return u, fmt.Errorf("read use of files: %w", err)
	}
	return u, nil
}

// refusal returns why an owner that has u gets no more files; nil: it may have more.
func (u used) refusal() error {
	if u.bytes < ownerBytesMax && u.files <= ownerFilesMax {
		return nil
	}
	return gateway.BadRequest(http.StatusBadRequest, "storage_limit_exceeded", "",
		"files take %d bytes in %d files; delete some, which takes effect within minutes: %d bytes and %d files "+
			"are allowed",
		u.bytes, u.files, int64(ownerBytesMax), ownerFilesMax)
}

// checkQuota refuses an owner whose files, those that are being written included, are more than it may have.
func checkQuota(ctx context.Context, db postgres.DB, owner string) error {
	u, err := usedBy(ctx, db, owner)
	if err != nil {
		return err
	}
	return u.refusal()
}

const lockOwnerSQL = `SELECT pg_advisory_xact_lock(hashtextextended('penstock files ' || $1, 0))`

// lockQuota refuses an owner that may have no further file. Until the transaction ends no other creates a file or a
// batch for the owner, so that of several that meet at the bound none exceeds it.
func lockQuota(ctx context.Context, tx pgx.Tx, owner string) error {
	if _, err := tx.Exec(ctx, lockOwnerSQL, owner); err != nil {
		return fmt.Errorf("lock use of files: %w", err)
	}
	u, err := usedBy(ctx, tx, owner)
	if err != nil {
		return err
	}
	u.files++
	return u.refusal()
}

// lockBatchQuota is lockQuota for a batch, with its two files.
func lockBatchQuota(ctx context.Context, tx pgx.Tx, owner string) error {
	if _, err := tx.Exec(ctx, lockOwnerSQL, owner); err != nil {
		return fmt.Errorf("lock use of files: %w", err)
	}
	u, err := usedBy(ctx, tx, owner)
	if err != nil {
		return err
	}
	if u.batches >= ownerBatchesMax {
		return gateway.BadRequest(http.StatusTooManyRequests, "too_many_batches", "",
			"%d batches have not ended: wait for one, or cancel one", u.batches)
	}
	u.files += 2
	return u.refusal()
}
