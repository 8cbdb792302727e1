package invalidation

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// NoteOutages records since when the models of queues with OnNoInstanceFail have had no usable instance.
func NoteOutages(ctx context.Context, db postgres.DB) error {
	if _, err := db.Exec(ctx, `SELECT penstock.note_outages()`); err != nil {
		return fmt.Errorf("note models without an instance: %w", err)
	}
	return nil
}

// FailWithoutInstance moves up to limit entries that wait to the failures, with class no_instance, if the queue has
// OnNoInstanceFail and its model has had no usable instance for NoInstanceTimeout, and returns how many.
func (q *Queue) FailWithoutInstance(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, `SELECT penstock.fail_without_instance($1, $2)`, q.ID, limit).Scan(&n)
	return n, q.errorf("fail entries without an instance of", err)
}
