package invalidation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// NextWork has the times of the next work of each kind that the elected leader does on a queue's entries, in seconds
// from the reading; negative: overdue, nil: never.
type NextWork struct {
	Queue    *Queue
	Due      *float64 // for Promote
	Deadline *float64 // for Expire
	Cancel   *float64 // for SettleCancelRequests
	Outage   *float64 // for FailWithoutInstance
}

// nextWorkSQL reads the first entries of three partial indexes, the first key that waits for a token
// bucket (penstock.throttle_key) and whether the last one waits for too long, whether a cancel is requested, and, if
// $2 is true, the end of the time for which entries wait for an instance. Deadlines and requested cancels of running
// entries stay there until their node ends the runs; such a queue is read in each pass without effect.
const nextWorkSQL = `
SELECT extract(epoch FROM least(
           (SELECT min(due_at) FROM penstock.entry_X WHERE status = 'initial'),
           (SELECT CASE WHEN r.last > penstock.throttled_too_long($1) THEN clock_timestamp()
                   ELSE to_timestamp(r.first / 1e6) END
              FROM (SELECT min(pos) AS first, max(pos) AS last FROM penstock.ready
                     WHERE queue_id = $1 AND priority = penstock.throttled_priority() AND flow = '') r))
           - clock_timestamp())::float8,
       extract(epoch FROM least(
           (SELECT min(start_by) FROM penstock.entry_X WHERE start_by IS NOT NULL),
           (SELECT min(finish_by) FROM penstock.entry_X WHERE finish_by IS NOT NULL)) - clock_timestamp())::float8,
       (SELECT 0 FROM penstock.cancel_request WHERE queue_id = $1 LIMIT 1)::float8,
       CASE WHEN $2::boolean THEN (
           SELECT extract(epoch FROM o.since + q.no_instance_timeout - clock_timestamp())
             FROM penstock.queue q
             JOIN penstock.model_outage o ON o.model = q.model
            WHERE q.id = $1) END::float8`

// ReadNextWork reads the next work of queues in one round trip. It fails if one of them cannot be read.
func ReadNextWork(ctx context.Context, db postgres.DB, queues []*Queue) ([]NextWork, error) {
	var works []NextWork
	batch := &pgx.Batch{}
	for _, q := range queues {
		fails := q.Config.OnNoInstance == OnNoInstanceFail
		batch.Queue(OnTable(q.Name, nextWorkSQL), q.ID, fails).QueryRow(func(row pgx.Row) error {
			w := NextWork{Queue: q}
			if err := row.Scan(&w.Due, &w.Deadline, &w.Cancel, &w.Outage); err != nil {
				return err
			}
			works = append(works, w)
			return nil
		})
	}
	if err := db.SendBatch(ctx, batch).Close(); err != nil {
		return nil, fmt.Errorf("find due entries: %w", err)
	}
	return works, nil
}
