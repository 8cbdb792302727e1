package openaibatch

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// fill gives the owner n files of so many bytes without a chunk.
func (s *shop) fill(n int, bytes int64) {
	s.Helper()
	s.exec(`INSERT INTO penstock.gateway_file (id, owner, filename, purpose, bytes) SELECT 'fill-' || i, 'shop', 'x', 'batch', $2
	          FROM generate_series(1, $1) i`, n, bytes)
}

// createUpload begins an upload as its route does, and returns the code of the refusal.
func (s *shop) createUpload(ctx context.Context) string {
	err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		if err := lockQuota(ctx, tx, "shop"); err != nil {
			return err
		}
		_, err := createFile(ctx, tx, "shop", "x", purposeBatch)
		return err
	})
	if err == nil {
		return ""
	}
	_, message := gateway.ErrorOf(err)
	return message
}

// Uploads that meet at the bound do not exceed it, and files that were deleted count until they are gone.
func TestUploadsBesideEachOtherKeepTheBoundOnFiles(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.fill(ownerFilesMax-2, 0)
	s.exec(`UPDATE penstock.gateway_file SET deleted_at = clock_timestamp()`)
	var group sync.WaitGroup
	refusals := make([]string, 6)
	for i := range refusals {
		group.Go(func() { refusals[i] = s.createUpload(t.Context()) })
	}
	group.Wait()
	passed := 0
	for _, r := range refusals {
		if r == "" {
			passed++
		} else if !strings.Contains(r, "are allowed") {
			t.Errorf("got %s", r)
		}
	}
	if passed != 2 {
		t.Errorf("%d of %d uploads passed, and there was room for 2", passed, len(refusals))
	}
}

// Bytes of files that are being written count, so that an upload is refused on its way.
func TestBytesOfUnfinishedUploadsCount(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.fill(3, ownerBytesMax/3)
	if err := checkQuota(t.Context(), s.pool, "shop"); err != nil {
		t.Errorf("got %v", err)
	}
	s.exec(`INSERT INTO penstock.gateway_file (id, owner, filename, purpose, bytes) VALUES ('more', 'shop', 'x', 'batch', 3)`)
	if err := checkQuota(t.Context(), s.pool, "shop"); err == nil {
		t.Error("no refusal")
	}
	if err := checkQuota(t.Context(), s.pool, "other"); err != nil {
		t.Errorf("another owner: %v", err)
	}
}

func TestOpenBatchesOfAnOwnerAreBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	file := s.file("nonsense")
	s.create(file)
	s.exec(`INSERT INTO penstock.gateway_batch (id, owner, flow, endpoint, input_file_id, output_file_id, error_file_id,
	                                            completion_window, expires_at)
	        SELECT 'fill-' || i, 'shop', '', '', '', '', '', '', 'infinity' FROM generate_series(2, $1) i`, ownerBatchesMax)
	_, err := createBatch(t.Context(), s.pool, order{Owner: "shop", Input: file})
	if status, message := gateway.ErrorOf(err); status != 429 || !strings.Contains(message, "have not ended") {
		t.Errorf("got %d %s", status, message)
	}
}
