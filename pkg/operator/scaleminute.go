package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// ScaleMinute has the load of a model in a minute, and the decision. Arrived to ColdSeconds are
// sums, the others the largest numbers of the minute.
type ScaleMinute struct {
	Minute      time.Time `json:"minute"`
	Arrived     float64   `json:"arrived"` // requests
	Online      float64   `json:"online"`  // of them through gateways
	Calls       int64     `json:"calls"`   // that ended
	BusySeconds float64   `json:"busy_seconds"`
	Refused     float64   `json:"refused"`
	Starts      int32     `json:"starts"` // instances that became ready
	ColdSeconds float64   `json:"cold_seconds"`
	Waiting     int32     `json:"waiting"`
	Running     int32     `json:"running"`
	Metric      int32     `json:"metric"` // that run and that may start
	Base        int32     `json:"base"`
	Raw         int32     `json:"raw"`
	Stabilised  int32     `json:"stabilised"`
	Desired     int32     `json:"desired"` // after rates and bounds
	Ready       int32     `json:"ready"`
	Starting    int32     `json:"starting"`
}

const scaleMinutesSQL = `
SELECT minute, arrived, online, calls, busy_seconds, refused, starts, cold_seconds, waiting, running,
       waiting + running AS metric, base, raw, stabilised, desired, ready, starting
  FROM (SELECT * FROM penstock.model_minute WHERE model = $1 AND minute > statement_timestamp() - $2::interval
         ORDER BY minute DESC LIMIT 43200) m
 ORDER BY minute`

// ScaleMinutes returns the minutes of a model over the period that ends now, oldest first. It returns
// invalidation.ErrNotFound if there is no such model.
func (d *Database) ScaleMinutes(ctx context.Context, model string, over time.Duration) ([]ScaleMinute, error) {
	found, err := list[ScaleMinute](ctx, d.db, "minutes of model "+model, scaleMinutesSQL, model, over)
	if err != nil || len(found) > 0 {
		return found, err
	}
	var known bool
	err = d.db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM penstock.model WHERE name = $1)`, model).Scan(&known)
	if err != nil {
		return nil, fmt.Errorf("list minutes of model %q: %w", model, err)
	}
	if !known {
		return nil, fmt.Errorf("model %q: %w", model, invalidation.ErrNotFound)
	}
	return found, nil
}

// Announcement is the registration of an instance for a time.
type Announcement struct {
	Model, Server, Endpoint string
	Slots                   int32
	Labels                  json.RawMessage // an object; nil for none
	TTL                     time.Duration
	Deployment              string // that started it; empty for none
}

const announceSQL = `
SELECT penstock.announce_instance($1, $2, $3, $4, coalesce($5::jsonb, '{}'), $6, $7, NULL, NULL, $8)`

// Announce registers an instance for a time, or renews that, and returns the order for the
// instance: serve, drain (its calls end, and it gets no new ones), or stop (none runs any more).
func (d *Database) Announce(ctx context.Context, a Announcement, by invalidation.By) (order string, err error) {
	err = d.db.QueryRow(ctx, announceSQL, a.Model, a.Server, a.Endpoint, a.Slots, a.Labels, a.TTL,
		given(a.Deployment), given(by.Actor)).Scan(&order)
	if err != nil {
		return "", fmt.Errorf("announce instance %s of model %q: %w", a.Server, a.Model, invalidation.Translate(err))
	}
	return order, nil
}
