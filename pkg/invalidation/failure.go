package invalidation

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// RetryFailure puts a failed entry back into its queue: the same id and history, no attempts spent, behind everybody
// who waits in its lane. Deadlines that have passed are dropped. ErrState says that it has not failed.
func RetryFailure(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, fmt.Sprintf("retry failure %d", id), `SELECT penstock.retry_failure($1, $2, $3)`, id, by.Reason, given(by.Actor))
}

// DiscardFailure forgets a failure before its retention does; only the audit remembers it then.
func DiscardFailure(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, fmt.Sprintf("discard failure %d", id), `SELECT penstock.discard_failure($1, $2, $3)`, id, by.Reason, given(by.Actor))
}
