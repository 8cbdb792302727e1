package operator

import (
	"context"
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
  FROM penstock.model_minute
 WHERE model = $1 AND minute > statement_timestamp() - $2::interval AND ($3::timestamptz IS NULL OR minute > $3)
 ORDER BY minute
 LIMIT $4`

// ScaleMinutes returns the minutes of a model over the period that ends now, oldest first, from the first after the
// given time. It returns invalidation.ErrNotFound if there is no such model.
func (d *Database) ScaleMinutes(
	ctx context.Context, model string, over time.Duration, after time.Time, limit int,
) ([]ScaleMinute, error) {
	found, err := list[ScaleMinute](ctx, d.db, "minutes of model "+model, scaleMinutesSQL, model, over, given(after),
		page(limit))
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
