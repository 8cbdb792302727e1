package api

import (
	"context"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) operationRoutes() {
	const one = "/v1/operations/{id}"
	add(a, route{
		method: "GET", path: "/v1/operations", id: "list-operations", summary: "Bulk operations, newest first",
		scope: read, of: ofQueue,
	}, a.listOperations)
	add(a, route{
		method: "POST", path: "/v1/queues/{queue}/operations", id: "start-operation",
		summary: "Retry, discard, cancel, disable or enable all that match; the elected leader carries it out",
		scope:   operate, of: ofQueue, status: http.StatusAccepted,
	}, a.startOperation)
	add(a, route{
		method: "GET", path: one, id: "show-operation", summary: "One operation with its progress",
		scope: read, of: ofOperation,
	}, func(ctx context.Context, in *InID) (*answer[operator.Operation], error) {
		return answered(a.operator.Operation(ctx, in.ID))
	})
	add(a, route{
		method: "POST", path: one + "/step", id: "step-operation",
		summary: "Carry out the next step of an operation now, without waiting for the elected leader",
		scope:   operate, of: ofOperation,
	}, a.stepOperation)
	verb[idVerb](a, operator.CancelOperation, route{
		path: one + "/cancel", id: "cancel-operation", summary: "End an operation; the changes that it made remain",
		scope: operate, of: ofOperation,
	})
}

type operationFilter struct {
	Paging
	OfOneQueue
	Running bool `query:"running" doc:"Only those that have not ended."`
}

func (a *API) listOperations(ctx context.Context, in *operationFilter) (*answer[list[operator.Operation]], error) {
	return paged(in.Paging, func(before int64, limit int) ([]operator.Operation, error) {
		return a.operator.Operations(ctx, operator.OperationFilter{
			Queue: in.Queue, Running: in.Running, Before: before,
			Limit: limit,
		})
	}, func(o operator.Operation) int64 { return o.ID })
}

type operationStart struct {
	InQueue
	Body struct {
		ReasonBody
		Verb   operator.OperationVerb `json:"verb" enum:"retry_failures,discard_failures,cancel,disable,enable,delete"`
		Filter struct {
			operator.Filter
			OlderThanSeconds float64 `json:"older_than_seconds,omitempty" minimum:"0" maximum:"3155760000" doc:"Accepted, or failed, longer ago than this; a hundred years at most."`
		} `json:"filter"`
		PerSecond int  `json:"per_second,omitempty" minimum:"1" maximum:"2147483647" doc:"Changes a second, at most; 1000 if absent."`
		DryRun    bool `json:"dry_run,omitempty" doc:"Only count what matches."`
	}
}

type operationStarted struct {
	ID       int64  `json:"operation_id,omitempty" doc:"Absent after a dry run."`
	Matching *int64 `json:"matching,omitempty" doc:"After a dry run: how many it would change."`
	Partial  bool   `json:"partial,omitempty" doc:"The queue has more than 100,000 entries, or failures, and those alone are counted."`
}

func (a *API) startOperation(ctx context.Context, in *operationStart) (*answer[operationStarted], error) {
	o := operator.OperationRequest{
		Queue: in.Queue, Verb: in.Body.Verb, Filter: in.Body.Filter.Filter, PerSecond: in.Body.PerSecond,
		By: in.Body.by(ctx),
	}
	o.Filter.OlderThan = time.Duration(in.Body.Filter.OlderThanSeconds * float64(time.Second))
	if in.Body.DryRun {
		leave, err := a.lists.enter(ctx, callerOf(ctx).holder())
		if err != nil {
			return nil, err
		}
		defer leave()
		n, whole, err := a.operator.CountFirst(ctx, o)
		return answered(operationStarted{Matching: &n, Partial: !whole}, err)
	}
	id, err := a.operator.StartOperation(ctx, o)
	return answered(operationStarted{ID: id}, err)
}

type stepped struct {
	WaitMS int64 `json:"wait_ms" doc:"How long its pace asks to wait before the next step."`
}

// stepOperation needs no reason: the audit has that of the operation.
func (a *API) stepOperation(ctx context.Context, in *InID) (*answer[stepped], error) {
	if _, err := a.operator.Operation(ctx, in.ID); err != nil {
		return nil, err
	}
	wait, err := a.operator.Step(ctx, in.ID)
	return answered(stepped{wait.Milliseconds()}, err)
}
