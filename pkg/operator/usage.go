package operator

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Usage is the usage of a flow of a queue, now and recently.
type Usage struct {
	Queue       string  `json:"queue"`
	Application string  `json:"application"`
	Flow        string  `json:"flow"`
	Locks       int64   `json:"locks"`
	Entries     int64   `json:"entries"` // that those locks cover
	Cost        float64 `json:"cost"`    // their cost, as pushed
	// OldestSeconds is how long its oldest lock has been held.
	OldestSeconds float64 `json:"oldest_lock_seconds"`
	// Slots are the slot-seconds a second that it got over the last minutes, with exponential
	// decay; Share is its part of its application's. Fairness uses these figures.
	Slots  float64 `json:"slots"`
	Share  float64 `json:"share"`
	Weight float64 `json:"weight"` // relative to other flows
}

// usageSQL reads all lock records, whose number is that of the work in flight, and the usage that
// nodes reported.
const usageSQL = `
SELECT queue, application, flow, coalesce(l.locks, 0) AS locks, coalesce(l.entries, 0) AS entries,
       coalesce(l.cost, 0) AS cost,
       coalesce(l.oldest, 0) AS oldest_seconds, coalesce(u.slots, 0) AS slots, coalesce(u.share, 0) AS share,
              coalesce(u.weight, 1)::float8 AS weight
  FROM (SELECT q.name AS queue, q.application, l.flow, count(*) AS locks, sum(l.entry_count)::bigint AS entries,
         sum(l.cost)::float8 AS cost,
               extract(epoch FROM clock_timestamp() - min(l.claimed_at))::float8 AS oldest
          FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id
         GROUP BY q.name, q.application, l.flow) l
  FULL JOIN penstock.usage_status u USING (queue, application, flow)
 WHERE ($1::text IS NULL OR queue = $1) AND (queue, flow) > ($2, $3)
 ORDER BY queue, flow
 LIMIT $4`

// Usage returns the usage of flows, by queue and flow, from the first after those given; of one
// queue if it is not empty.
func (d *Database) Usage(ctx context.Context, queue, afterQueue, afterFlow string, limit int) ([]Usage, error) {
	return list[Usage](ctx, d.db, "usage", usageSQL, given(queue), afterQueue, afterFlow, page(limit))
}

// SetFlowWeight sets the weight of a flow among other flows, by default 1, in one queue or, if that
// is empty, in all. A weight of 0 removes it. Nodes apply it within one heartbeat.
func (d *Database) SetFlowWeight(ctx context.Context, flow, queue string, weight float64, by invalidation.By) error {
	const sql = `SELECT penstock.set_flow_weight($3, $4, $5, $1, coalesce($2, current_user::text))`
	return d.change(ctx, fmt.Sprintf("set weight of flow %q", flow), sql, by, flow, given(weight), given(queue))
}

// QueueShare is the service that a queue got in the last minutes, and its weight.
type QueueShare struct {
	Queue       string  `json:"queue"`
	Application string  `json:"application"`
	Weight      float64 `json:"weight"`
	Slots       float64 `json:"slots"` // slot-seconds a second, with exponential decay
	Busy        bool    `json:"busy"`  // it has ready rows or locks now
}

// queueSharesSQL reads the bands of queues in the usage, and looks for one ready row and one lock of each queue.
const queueSharesSQL = `
SELECT q.name AS queue, q.application, q.priority::float8 AS weight, u.slots,
       (SELECT true FROM penstock.ready WHERE queue_id = q.id LIMIT 1) IS NOT NULL
       OR (SELECT true FROM penstock.lock WHERE queue_id = q.id LIMIT 1) IS NOT NULL AS busy
  FROM penstock.queue q
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(greatest(0, penstock.usage_left(x.service, x.at))), 0)::float8 * ln(2::float8) / 300 AS slots
         FROM penstock.usage x WHERE x.queue_id = q.id AND NOT x.whole) u
 ORDER BY q.name`

// QueueShares returns the service and weight of each queue.
func (d *Database) QueueShares(ctx context.Context) ([]QueueShare, error) {
	return list[QueueShare](ctx, d.db, "shares of queues", queueSharesSQL)
}
