package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) pauseRoutes() {
	const all = "/v1/pauses"
	add(a, route{
		method: "GET", path: all, id: "list-pauses", summary: "Pauses in force, oldest first",
		scope: read, of: ofQueue,
	}, a.listPauses)
	pausing(a, route{
		path: all, id: "pause", summary: "Stop claims of a flow, name, lock key, model, application or node",
		scope: operate, of: ofQueue,
	}, func(ctx context.Context, in *struct {
		OfOneQueue
		Body pauseBody
	},
	) (*operator.Replaced, error) {
		until, err := a.operator.At(ctx, in.Body.Until.Moment)
		if err != nil {
			return nil, err
		}
		return a.operator.Pause(ctx, operator.Subject{Scope: in.Body.Scope, Value: in.Body.Value, Queue: in.Queue},
			in.Body.by(ctx), until)
	})
	change(a, route{
		method: "DELETE", path: all, id: "resume", summary: "End a pause",
		scope: operate, of: ofQueue,
	}, func(ctx context.Context, in *struct {
		OfOneQueue
		ReasonQuery
		Scope operator.Scope `query:"scope" required:"true" enum:"name,lock_key,flow,model,application,node"`
		Value string         `query:"value" doc:"Empty: entries without a flow."`
	},
	) error {
		return a.operator.Resume(ctx, operator.Subject{Scope: in.Scope, Value: in.Value, Queue: in.Queue}, in.by(ctx))
	})
}

type pauseBody struct {
	UntilBody
	Scope operator.Scope `json:"scope" enum:"name,lock_key,flow,model,application,node"`
	Value string         `json:"value" doc:"Empty: entries without a flow."`
}

type pauseFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listPauses(ctx context.Context, in *pauseFilter) (*answer[list[operator.Pause]], error) {
	return paged(in.Paging, func(after operator.PauseKey, limit int) ([]operator.Pause, error) {
		return a.operator.Pauses(ctx, operator.PauseFilter{Queue: in.Queue, After: after, Limit: limit})
	}, func(p operator.Pause) operator.PauseKey {
		return operator.PauseKey{Since: p.Since, Scope: p.Scope, Value: p.Value, Queue: p.Queue}
	})
}
