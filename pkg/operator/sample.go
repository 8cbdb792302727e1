package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Sample is the state of a queue at one time, or over a minute: depths, rates and nodes are then
// means, HeadAgeSeconds the maximum.
type Sample struct {
	At             time.Time `json:"at"`
	Initial        int64     `json:"initial"`
	Pending        int64     `json:"pending"`
	Computing      int64     `json:"computing"`
	Disabled       int64     `json:"disabled"`
	Failed         int64     `json:"failed"`
	Estimated      bool      `json:"estimated"`
	Serving        int       `json:"serving"`
	HeadAgeSeconds *float64  `json:"head_age_seconds"`
	Blocked        *string   `json:"blocked,omitempty"`
	InPerSecond    *float64  `json:"in_per_second"`
	OutPerSecond   *float64  `json:"out_per_second"`
}

const samplesSQL = `
SELECT s.at, s.initial, s.pending, s.computing, s.disabled, s.failed, s.estimated, s.serving,
       s.head_age AS head_age_seconds, s.blocked,
       s.in_per_second, s.out_per_second
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT * FROM penstock.%s
        WHERE queue_id = q.id AND at BETWEEN statement_timestamp() - $2::interval AND statement_timestamp()
              ORDER BY at DESC LIMIT 3000) s
 WHERE q.name = $1
 ORDER BY s.at`

// Samples returns the samples of a queue over the period that ends now, oldest first: each sample
// for up to an hour, else one a minute; at most the newest 3,000. It returns
// invalidation.ErrQueueNotFound if there is no such queue.
func (d *Database) Samples(ctx context.Context, queue string, over time.Duration) ([]Sample, error) {
	table := "sample"
	if over > time.Hour {
		table = "sample_minute"
	}
	found, err := list[Sample](ctx, d.db, "samples of queue "+queue, fmt.Sprintf(samplesSQL, table), queue, over)
	if err != nil || len(found) > 0 {
		return found, err
	}
	var known bool
	err = d.db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM penstock.queue WHERE name = $1)`, queue).Scan(&known)
	if err == nil && !known {
		err = invalidation.ErrQueueNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("list samples of queue %q: %w", queue, err)
	}
	return found, nil
}
