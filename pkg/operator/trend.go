package operator

import (
	"context"
	"time"
)

// TrendPoint is the state of one queue over a step of time: means of its samples, and the largest
// number of failures.
type TrendPoint struct {
	Queue          string    `json:"queue"`
	At             time.Time `json:"at"` // when the step begins
	Initial        float64   `json:"initial"`
	Pending        float64   `json:"pending"`
	Computing      float64   `json:"computing"`
	Failed         int64     `json:"failed"`
	HeadAgeSeconds *float64  `json:"head_age_seconds"` // the largest
	InPerSecond    *float64  `json:"in_per_second"`
	OutPerSecond   *float64  `json:"out_per_second"`
	// Gone is the number of entries that left the queue since the sample before the step. In the first step of the
	// period those before its first sample count only of a queue that was made within the period.
	Gone int64 `json:"gone"`
}

// trendsSQL reads samples of the period $1 by the primary key, and groups them by steps of $2
// seconds.
const trendsSQL = `
SELECT q.name AS queue, s.at, s.initial, s.pending, s.computing, s.failed, s.head_age_seconds,
       s.in_per_second, s.out_per_second, s.gone
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT to_timestamp(floor(extract(epoch FROM x.at) / $2::float8) * $2::float8) AS at,
              avg(x.initial)::float8 AS initial, avg(x.pending)::float8 AS pending,
              avg(x.computing)::float8 AS computing,
              max(x.failed) AS failed, max(x.head_age) AS head_age_seconds,
              avg(x.in_per_second) AS in_per_second, avg(x.out_per_second) AS out_per_second,
              sum(x.gone)::bigint AS gone
         FROM (SELECT at, initial, pending, computing, failed, head_age, in_per_second, out_per_second,
                      greatest(gone - coalesce(lag(gone) OVER (ORDER BY at),
                                               CASE WHEN q.created_at > statement_timestamp() - $1::interval THEN 0
                                                    ELSE gone END), 0) AS gone
                 FROM penstock.sample
                WHERE queue_id = q.id AND at BETWEEN statement_timestamp() - $1::interval AND statement_timestamp()
                ORDER BY at DESC LIMIT 1000) x
        GROUP BY 1) s
 ORDER BY q.name, s.at`

// Trends returns the samples of all queues over the period that ends now, by queue and time, in
// steps of at least a second. Samples are taken about every five seconds and kept for a day.
func (d *Database) Trends(ctx context.Context, over, step time.Duration) ([]TrendPoint, error) {
	return list[TrendPoint](ctx, d.db, "trends", trendsSQL, over, max(step, time.Second).Seconds())
}
