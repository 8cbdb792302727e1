package operator

import (
	"context"
	"time"
)

// Slot is a slot of an instance that a node holds.
type Slot struct {
	Model    string     `json:"model"`
	Server   string     `json:"server"`
	Number   int32      `json:"number"`
	Token    int64      `json:"token"`
	NodeID   NodeID     `json:"node_id"`
	LeasedAt time.Time  `json:"leased_at"`
	DoubtAt  *time.Time `json:"doubt_at,omitempty"` // since when the call of a lost node may still run
	Doubt    string     `json:"doubt,omitempty"`
	EntryID  *int64     `json:"entry_id,omitempty"`
}

const slotsSQL = `
SELECT i.model, i.server, s.number, s.token, s.node_id, s.leased_at, s.doubt_at, coalesce(s.doubt, '') AS doubt, s.entry_id
  FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
 WHERE ($1::text IS NULL OR i.model = $1) AND s.token > $2
 ORDER BY s.token
 LIMIT $3`

// Slots returns the slots that are held, oldest lease first, behind the token after; of one model if it is not empty.
func (d *Database) Slots(ctx context.Context, model string, after int64, limit int) ([]Slot, error) {
	return list[Slot](ctx, d.db, "slots", slotsSQL, given(model), after, page(limit))
}

// Usage is what a flow of a queue uses now.
type Usage struct {
	Queue       string  `json:"queue"`
	Application string  `json:"application"`
	Flow        string  `json:"flow"`
	Locks       int64   `json:"locks"`
	Entries     int64   `json:"entries"` // that those locks cover
	Cost        float64 `json:"cost"`    // their cost, as pushed
	// OldestSeconds is how long its oldest lock has been held.
	OldestSeconds float64 `json:"oldest_lock_seconds"`
}

// usageSQL reads all lock records, which are as few as the work in flight.
const usageSQL = `
SELECT q.name AS queue, q.application, l.flow, count(*) AS locks, sum(l.entry_count)::bigint AS entries, sum(l.cost)::float8 AS cost,
       extract(epoch FROM clock_timestamp() - min(l.claimed_at))::float8 AS oldest_seconds
  FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id
 WHERE ($1::text IS NULL OR q.name = $1) AND (q.name, l.flow) > ($2, $3)
 GROUP BY q.name, q.application, l.flow
 ORDER BY q.name, l.flow
 LIMIT $4`

// Usage returns what flows use now, by queue and flow, behind those given; of one queue if it is not empty.
func (d *Database) Usage(ctx context.Context, queue, afterQueue, afterFlow string, limit int) ([]Usage, error) {
	return list[Usage](ctx, d.db, "usage", usageSQL, given(queue), afterQueue, afterFlow, page(limit))
}
