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
SELECT queue, application, flow, coalesce(l.locks, 0) AS locks, coalesce(l.entries, 0) AS entries, coalesce(l.cost, 0) AS cost,
       coalesce(l.oldest, 0) AS oldest_seconds, coalesce(u.slots, 0) AS slots, coalesce(u.share, 0) AS share, coalesce(u.weight, 1)::float8 AS weight
  FROM (SELECT q.name AS queue, q.application, l.flow, count(*) AS locks, sum(l.entry_count)::bigint AS entries, sum(l.cost)::float8 AS cost,
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
