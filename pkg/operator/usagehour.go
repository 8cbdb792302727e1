package operator

import (
	"context"
	"time"
)

// UsageHour is the use that the calls of a flow made of the workers of a model in one hour.
type UsageHour struct {
	Hour        time.Time `json:"hour"`
	Queue       string    `json:"queue"` // #id for a queue that was dropped
	Application string    `json:"application"`
	Model       string    `json:"model"`
	Flow        string    `json:"flow"`
	Calls       int64     `json:"calls"`
	// milliseconds in which slots were busy, times the GPUs of their instances
	GPUMS        int64 `json:"gpu_ms" db:"gpu_ms"`
	WastedMS     int64 `json:"wasted_ms"` // of these, for runs whose answer was not kept
	TokensIn     int64 `json:"tokens_in"`
	TokensCached int64 `json:"tokens_cached"` // of TokensIn
	TokensOut    int64 `json:"tokens_out"`
}

// UsageFilter selects hours of usage; empty fields select all.
type UsageFilter struct {
	From, To                        time.Time // beginnings of hours: From is included, To is not
	Application, Queue, Model, Flow string
	After                           UsageKey // the last row of the page before
	Limit                           int
}

// UsageKey is the position of a UsageHour in the list.
type UsageKey struct {
	Hour               time.Time
	Queue, Model, Flow string
}

const usageHoursSQL = `
SELECT hour, queue, coalesce(application, '') AS application, model, flow, calls, gpu_ms, wasted_ms, tokens_in,
       tokens_cached, tokens_out
  FROM penstock.usage_hours
 WHERE ($1::timestamptz IS NULL OR hour >= $1) AND ($2::timestamptz IS NULL OR hour < $2)
   AND ($3::text IS NULL OR application = $3) AND ($4::text IS NULL OR queue = $4)
   AND ($5::text IS NULL OR model = $5) AND ($6::text IS NULL OR flow = $6)
   AND ($7::timestamptz IS NULL OR (hour, queue, model, flow) > ($7, $8, $9, $10))
 ORDER BY hour, queue, model, flow
 LIMIT $11`

// UsageHours returns the use of workers by hour, queue, model and flow.
func (d *Database) UsageHours(ctx context.Context, f UsageFilter) ([]UsageHour, error) {
	return list[UsageHour](ctx, d.db, "hours of usage", usageHoursSQL, given(f.From), given(f.To), given(f.Application),
		given(f.Queue),
		given(f.Model), given(f.Flow), given(f.After.Hour), f.After.Queue, f.After.Model, f.After.Flow, page(f.Limit))
}

// GPUUse is the time for which slots of models were busy with calls that have ended since the beginning of the hour
// before this one, times the GPUs of their instances. The part of such a call from before that is in it.
type GPUUse struct {
	Seconds float64 `json:"seconds"`
	Wasted  float64 `json:"wasted_seconds"` // of that, for runs whose answer was not kept
	Over    float64 `json:"over_seconds"`   // the time since that beginning
}

// gpuSQL sums the last two rows of each queue, model and flow. Nodes add to them every few seconds. Rows of a time to
// come are from before the clock was set back.
const gpuSQL = `
SELECT coalesce(sum(gpu_ms), 0)::float8 / 1000 AS seconds, coalesce(sum(wasted_ms), 0)::float8 / 1000 AS wasted,
       extract(epoch FROM statement_timestamp()
                        - date_trunc('hour', statement_timestamp() - interval '1 hour', 'UTC'))::float8 AS over
  FROM penstock.usage_hour
 WHERE hour >= date_trunc('hour', statement_timestamp() - interval '1 hour', 'UTC')
   AND hour <= statement_timestamp()`

// GPU returns the use of GPUs in this hour and the one before.
func (d *Database) GPU(ctx context.Context) (GPUUse, error) {
	return show[GPUUse](ctx, d.db, "use of GPUs", nil, gpuSQL)
}
