package gateway

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/usage"
)

// UsageMeter adds up the measured use of calls, and folds it every second: into the hours of use, and into the use by
// which durable entries are ordered.
type UsageMeter struct {
	*usage.Meter[usageKey, used]
}

// usageKey names what was used by a flow in an hour, or, by its model alone, requests that were refused.
type usageKey struct {
	hour               time.Time
	queue, model, flow string
	shared             bool
}

func (k usageKey) compare(other usageKey) int {
	return cmp.Or(k.hour.Compare(other.hour), cmp.Compare(k.queue, other.queue), cmp.Compare(k.model, other.model),
		cmp.Compare(k.flow, other.flow))
}

type used struct {
	calls, in, out     int64
	gpu, extra, wasted time.Duration // extra: of gpu, what is beyond the time of the slots; wasted is of gpu too
	refused            int64         // requests
}

func (u *used) add(more used) {
	u.calls += more.calls
	u.in += more.in
	u.out += more.out
	u.gpu += more.gpu
	u.extra += more.extra
	u.wasted += more.wasted
	u.refused += more.refused
}

func (u *used) times() []*time.Duration { return []*time.Duration{&u.gpu, &u.extra, &u.wasted} }

// NewUsageMeter returns a meter without use. node returns the present incarnation of the gateway.
func NewUsageMeter(db postgres.DB, node func() invalidation.NodeID, log *slog.Logger) *UsageMeter {
	return &UsageMeter{usage.New(usage.Config[usageKey, used]{
		DB: db, Node: node, Every: time.Second, EndMax: 2 * time.Second, Step: "fold use", Log: log,
		Compare: usageKey.compare, Add: (*used).add, Times: (*used).times, Send: foldUsage,
	})}
}

// Charge implements Charger.
func (m *UsageMeter) Charge(c Charge) {
	u := used{calls: 1, in: c.TokensIn, out: c.TokensOut, gpu: c.GPU, extra: c.GPU - c.Took}
	if c.Wasted {
		u.wasted = c.GPU
	}
	m.Add(usageKey{hour: m.Hour(), queue: c.Queue, model: c.Model, flow: c.Flow, shared: !c.Separate}, u)
}

// Refuse implements Charger.
func (m *UsageMeter) Refuse(model string) { m.Add(usageKey{model: model}, used{refused: 1}) }

const foldUsageSQL = `
SELECT penstock.fold_online_gpu($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15),
       clock_timestamp()`

// foldUsage adds rows to the database.
func foldUsage(
	ctx context.Context, db postgres.DB, node invalidation.NodeID, seq int64, rows []usage.Row[usageKey, used],
) (now time.Time, err error) {
	var c usageColumns
	for _, r := range rows {
		c.append(r.Key, r.Used)
	}
	var applied bool // false: it was so before, and its answer was lost
	err = db.QueryRow(ctx, foldUsageSQL, node, seq, c.hours, c.queues, c.models, c.flows, c.calls, c.gpu, c.extra,
		c.wasted, c.in, c.out, c.shared, c.refusedModels, c.refused).Scan(&applied, &now)
	if err != nil {
		return now, fmt.Errorf("fold use of %d flows: %w", len(c.hours), err)
	}
	return now, nil
}

type usageColumns struct {
	hours                       []time.Time
	queues, models, flows       []string
	calls, gpu, wasted, in, out []int64
	extra                       []int64
	shared                      []bool
	refusedModels               []string
	refused                     []int64
}

func (c *usageColumns) append(k usageKey, u used) {
	if u.refused > 0 {
		c.refusedModels, c.refused = append(c.refusedModels, k.model), append(c.refused, u.refused)
		return
	}
	c.hours, c.queues, c.models = append(c.hours, k.hour), append(c.queues, k.queue), append(c.models, k.model)
	c.flows, c.calls = append(c.flows, k.flow), append(c.calls, u.calls)
	c.gpu, c.extra = append(c.gpu, u.gpu.Milliseconds()), append(c.extra, u.extra.Milliseconds())
	c.wasted = append(c.wasted, u.wasted.Milliseconds())
	c.in, c.out, c.shared = append(c.in, u.in), append(c.out, u.out), append(c.shared, k.shared)
}
