package operator

import (
	"context"
	"time"
)

// RequestBatch is a batch of requests that a client of a gateway made from a file and that has not ended. It is
// another thing than a Batch, which is a set that a queue processes in parts.
type RequestBatch struct {
	ID          string    `json:"id"`
	Client      string    `json:"client"`          // name of the token
	Model       string    `json:"model,omitempty"` // absent until the file was read
	Status      string    `json:"status" doc:"validating, in_progress, finalizing or cancelling."`
	Requests    int32     `json:"requests"` // lines of the file
	Pushed      int32     `json:"pushed"`   // of them entries by now
	Completed   int32     `json:"completed"`
	Failed      int32     `json:"failed"`
	FailedTurns int32     `json:"failed_turns"` // of gateways that worked on it, since the last one that did not fail
	CreatedAt   time.Time `json:"created_at"`
	ExpiresAt   time.Time `json:"expires_at"`
}

// RequestBatchKey is the position of a RequestBatch in the list.
type RequestBatchKey struct {
	CreatedAt time.Time
	ID        string
}

const requestBatchesSQL = `
SELECT b.id, b.owner AS client, coalesce(b.model, '') AS model, b.status, b.total AS requests, b.fed AS pushed,
       b.completed, b.failed, b.failed_turns, b.created_at, b.expires_at
  FROM penstock.gateway_batch b
 WHERE b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND (b.created_at, b.id) > ($1, $2)
 ORDER BY b.created_at, b.id
 LIMIT $3`

// RequestBatches returns the batches of requests that have not ended, the oldest first, from the first behind the
// given key.
func (d *Database) RequestBatches(ctx context.Context, after RequestBatchKey, limit int) ([]RequestBatch, error) {
	return list[RequestBatch](ctx, d.db, "batches of requests", requestBatchesSQL, after.CreatedAt, after.ID,
		page(limit))
}
