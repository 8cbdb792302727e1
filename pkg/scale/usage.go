package scale

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// usage describes the use of an instance, by the last heartbeats of nodes and gateways.
type usage struct {
	remaining time.Duration // expected time until the last of its calls has ended; 0 where none runs
	affinity  float64       // 1 where a call has just used what the instance has loaded; 0 where nothing is loaded
}

// affinityHalf is the time without use in which what an instance has loaded loses half of its worth.
const affinityHalf = 10 * time.Minute

// reportsSQL reads what each node that lives told of instances: a gateway of those of model $1, a task node of all.
const reportsSQL = `
SELECT CASE WHEN n.kind = 'gateway' THEN n.load->'pools'->$1::text->'instances' ELSE n.load->'instances' END
  FROM penstock.node n
 WHERE n.beat_at + n.lease > clock_timestamp()`

// instanceReport is the part of a report that is read, see inference.InstanceReport and gateway.InstanceView.
type instanceReport struct {
	ID          int32   `json:"id"`
	InFlight    int     `json:"in_flight"`
	RemainingMS float64 `json:"remaining_ms"`
	LoadedMS    float64 `json:"loaded_ms"`
}

// mayDrop says whether a round may have to choose which instances it gives up.
func mayDrop(s applied, registered []registration) bool {
	other := func(r registration) bool { return r.TemplateHash != "" && r.TemplateHash != s.TemplateHash }
	return len(registered) > s.Desired || s.TemplateHash != "" && slices.ContainsFunc(registered, other)
}

// readUsage notes what is known about the use of instances. A report that cannot be read tells nothing: which instance
// goes first is a matter of cost alone, since none goes before its slots are free.
func (a *applier) readUsage(ctx context.Context, model string, registered []registration) error {
	texts, err := pgx.CollectRows(postgres.Query(ctx, a.db, reportsSQL, model), pgx.RowTo[[]byte])
	if err != nil {
		return err
	}
	byID := map[int32]usage{}
	for _, text := range texts {
		var reports []instanceReport
		if json.Unmarshal(text, &reports) != nil {
			continue
		}
		for _, r := range reports {
			byID[r.ID] = byID[r.ID].with(r)
		}
	}
	for i := range registered {
		registered[i].usage = byID[registered[i].ID]
	}
	return nil
}

// remainingMax bounds what a node may expect.
const remainingMax = 7 * 24 * time.Hour

// with adds a report. The last call of all nodes counts, and the newest use of what is loaded.
func (u usage) with(r instanceReport) usage {
	if r.InFlight > 0 {
		ms := min(max(r.RemainingMS, 1), float64(remainingMax.Milliseconds()))
		u.remaining = max(u.remaining, time.Duration(ms*float64(time.Millisecond)))
	}
	if r.LoadedMS > 0 {
		u.affinity = max(u.affinity, math.Exp2(-r.LoadedMS/float64(affinityHalf.Milliseconds())))
	}
	return u
}
