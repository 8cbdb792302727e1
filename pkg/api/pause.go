package api

import (
	"context"
	"fmt"
	"slices"

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
		return a.operator.Pause(ctx, operator.Subject{Scope: in.Body.Scope, Value: in.Body.Value, Queue: in.Queue},
			in.Body.by(ctx), in.Body.Until.Time)
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
	found, err := a.operator.Pauses(ctx, operator.PageMax)
	if in.Queue != "" {
		found = slices.DeleteFunc(found, func(p operator.Pause) bool {
			return p.Queue != in.Queue && (p.Scope != "queue" || p.Value != in.Queue)
		})
	}
	return pageFrom(found, err, in.Paging, func(p operator.Pause) string {
		return fmt.Sprintf("%s\x00%s\x00%s", p.Since.UTC().Format("2006-01-02T15:04:05.000000"), p.Scope, p.Value)
	})
}
