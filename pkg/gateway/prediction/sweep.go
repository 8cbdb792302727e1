package prediction

import (
	"context"
	"fmt"
)

// sweepSQL removes predictions of which nothing is known any more from the pages of the table from the one with tid $1
// to before that of $2, and returns how many pages there are as well. It looks up what is known row by row, in any
// plan: subqueries of one value are not made joins.
const sweepSQL = `
WITH old AS (
    DELETE FROM penstock.prediction
     WHERE ctid = ANY (ARRAY(
           SELECT p.ctid FROM penstock.prediction p
            WHERE p.ctid >= $1::text::tid AND p.ctid < $2::text::tid
              AND p.created_at < clock_timestamp() - interval '1 hour'
              AND (SELECT min(e.id) FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id) IS NULL
              AND (SELECT min(r.entry_id) FROM penstock.result r
                    WHERE r.queue_id = p.queue_id AND r.entry_id = p.entry_id) IS NULL
              AND (SELECT min(f.entry_id) FROM penstock.failure f
                    WHERE f.queue_id = p.queue_id AND f.entry_id = p.entry_id) IS NULL
              FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.prediction') / current_setting('block_size')::int FROM old`

const sweepSteps = 100 // statements in a sweep

// sweep reads a part of the table and removes what of it is to go. The next one goes on behind it.
func (s *Predictions) sweep(ctx context.Context) error {
	for range sweepSteps {
		var gone, pages int64
		first, end := s.swept.Range()
		if err := s.db.QueryRow(ctx, sweepSQL, first, end).Scan(&gone, &pages); err != nil {
			return fmt.Errorf("sweep predictions: %w", err)
		}
		if !s.swept.Next(pages) {
			return nil
		}
	}
	return nil
}
