package invalidation

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// Cancelled is the answer to CancelEntry.
type Cancelled string

// The answers to CancelEntry.
const (
	CancelDone      Cancelled = "cancelled" // it has ended
	CancelRequested Cancelled = "requested" // a node runs it, or is about to, and hears of it at its heartbeat
)

// CancelEntry ends an entry wherever it is. ErrEntryNotFound says that there is none, ErrState that it has ended
// already, with the outcome in the message.
func CancelEntry(ctx context.Context, db postgres.DB, id EntryID, by By) (Cancelled, error) {
	var answer Cancelled
	err := db.QueryRow(ctx, `SELECT penstock.cancel_entry($1, $2, $3)`, id, by.Reason, given(by.Actor)).Scan(&answer)
	if err != nil {
		return "", fmt.Errorf("cancel entry %d: %w", id, translate(err))
	}
	return answer, nil
}

// SettleCancelRequests ends up to limit entries that were asked to end while they ran and came back into line since,
// and returns how many. The elected leader calls it every few seconds.
func (q *Queue) SettleCancelRequests(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, `SELECT penstock.settle_cancel_requests($1, $2)`, q.ID, limit).Scan(&n)
	return n, q.errorf("settle cancel requests of", err)
}
