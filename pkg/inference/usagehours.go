package inference

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// UsageHour is what the calls of a flow took of the workers of a model in one hour.
type UsageHour struct {
	Hour         time.Time `json:"hour"`
	Queue        string    `json:"queue"` // #id for one that was dropped
	Application  string    `json:"application"`
	Model        string    `json:"model"`
	Flow         string    `json:"flow"`
	Calls        int64     `json:"calls"`
	GPUMS        int64     `json:"gpu_ms"`    // milliseconds that slots were busy, times the GPUs of their instances
	WastedMS     int64     `json:"wasted_ms"` // of these, for runs whose answer was not kept
	TokensIn     int64     `json:"tokens_in"`
	TokensCached int64     `json:"tokens_cached"` // of TokensIn
	TokensOut    int64     `json:"tokens_out"`
}

// UsageFilter selects hours of usage. Empty fields select all.
type UsageFilter struct {
	From, To                        time.Time // of the hours' beginnings: From included, To not
	Application, Queue, Model, Flow string
	After                           *UsageHour // the last row of the page before
	Limit                           int        // rows; 0: 1000
}

const usageHoursSQL = `
SELECT hour, queue, coalesce(application, ''), model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out
  FROM penstock.usage_hours
 WHERE ($1::timestamptz IS NULL OR hour >= $1) AND ($2::timestamptz IS NULL OR hour < $2)
   AND ($3 = '' OR application = $3) AND ($4 = '' OR queue = $4) AND ($5 = '' OR model = $5) AND ($6 = '' OR flow = $6)
   AND ($7::timestamptz IS NULL OR (hour, queue, model, flow) > ($7, $8, $9, $10))
 ORDER BY hour, queue, model, flow
 LIMIT $11`

// UsageHours lists the usage of workers by hour, queue, model and flow, in that order.
func UsageHours(ctx context.Context, db postgres.DB, f UsageFilter) ([]UsageHour, error) {
	limit := f.Limit
	if limit <= 0 {
		limit = 1000
	}
	var after UsageHour
	if f.After != nil {
		after = *f.After
	}
	rows := postgres.Query(ctx, db, usageHoursSQL, given(f.From), given(f.To), f.Application, f.Queue, f.Model, f.Flow,
		given(after.Hour), after.Queue, after.Model, after.Flow, limit)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[UsageHour])
	if err != nil {
		return nil, fmt.Errorf("list hours of usage: %w", err)
	}
	return found, nil
}

// given is nil, NULL in SQL, for the zero time.
func given(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
