package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) batchRoutes() {
	const one = "/v1/batches/{id}"
	add(a, route{method: "GET", path: "/v1/batches", id: "list-batches", summary: "Batches and how far they are, newest first", scope: read, of: ofQueue}, a.listBatches)
	add(a, route{method: "POST", path: "/v1/queues/{queue}/batches", id: "create-batch", summary: "Split a set into parts that this queue runs", scope: operate, of: ofQueue, status: http.StatusCreated, bytesMax: a.cfg.BodyBytesMax}, a.createBatch)
	add(a, route{method: "GET", path: one, id: "show-batch", summary: "One batch", scope: read, of: ofBatch}, func(ctx context.Context, in *InID) (*answer[operator.Batch], error) {
		found, err := a.operator.Batch(ctx, in.ID)
		return &answer[operator.Batch]{found}, err
	})
	verb[idPause](a, operator.PauseBatch, route{path: one + "/pause", id: "pause-batch", summary: "Take the parts that nobody runs out of the queue", scope: operate, of: ofBatch})
	verb[idVerb](a, operator.ResumeBatch, route{path: one + "/resume", id: "resume-batch", summary: "End a pause", scope: operate, of: ofBatch})
	verb[idVerb](a, operator.CancelBatch, route{path: one + "/cancel", id: "cancel-batch", summary: "End a batch; parts that run are asked to end", scope: operate, of: ofBatch})
	verb[idVerb](a, operator.RetryBatch, route{path: one + "/retry", id: "retry-batch", summary: "Run the parts again that did not end done", scope: operate, of: ofBatch})
}

type batchFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listBatches(ctx context.Context, in *batchFilter) (*answer[list[operator.Batch]], error) {
	return paged(in.Paging, func(before int64, limit int) ([]operator.Batch, error) {
		return a.operator.Batches(ctx, operator.BatchFilter{Queue: in.Queue, Before: before, Limit: limit})
	}, func(b operator.Batch) int64 { return b.ID })
}

type batchCreation struct {
	InQueue
	Body struct {
		Because
		Name    string         `json:"name" minLength:"1" maxLength:"200"`
		Options map[string]any `json:"options" doc:"items, or query (which needs scope admin, for it is SQL); part_size, window_parts, detail, flow, priority, completion_queue."`
	}
}

// createBatch lets a query in from admins alone: the leader runs it with its own rights in the database. A limited
// token reaches no other queue by way of completion_queue.
func (a *API) createBatch(ctx context.Context, in *batchCreation) (*answer[created], error) {
	c := who(ctx)
	if _, given := in.Body.Options["query"]; given && (!c.may(admin) || c.limited()) {
		return nil, fmt.Errorf("%w: a query needs scope admin, without limits", errForbidden)
	}
	if other, given := in.Body.Options["completion_queue"]; given && c.limited() {
		if err := a.allowed(ctx, ofQueue, fmt.Sprint(other), c); err != nil {
			return nil, err
		}
	}
	id, err := a.operator.CreateBatch(ctx, in.Body.Name, in.Queue, in.Body.Options, in.Body.by(ctx))
	return &answer[created]{created{id}}, err
}

// created names what was made.
type created struct {
	ID int64 `json:"id"`
}
