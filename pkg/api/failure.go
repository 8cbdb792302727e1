package api

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) failureRoutes() {
	const one = "/v1/failures/{id}"
	add(a, route{
		method: "GET", path: "/v1/failures", id: "list-failures", summary: "Failures of a queue, largest ids first",
		scope: read, of: ofQueue,
	}, a.listFailures)
	add(a, route{
		method: "GET", path: "/v1/queues/{queue}/causes", id: "list-causes",
		summary: "Causes of the 10,000 failures with the largest ids: fingerprints by frequency, at most 200",
		scope:   read, of: ofQueue,
	}, func(ctx context.Context, in *causesFilter) (*answer[list[operator.Cause]], error) {
		found, err := a.operator.Causes(ctx, in.Queue, in.Since, 200)
		return pageOf(found, Paging{Limit: 200}, nil), err
	})
	add(a, route{
		method: "GET", path: one, id: "show-failure", summary: "One failure with payload and history",
		scope: read, of: ofEntry,
	}, func(ctx context.Context, in *InID) (*answer[operator.FailureDetail], error) {
		return answered(a.operator.Failure(ctx, in.ID))
	})
	verb[idVerb](a, operator.RetryFailure, route{
		path: one + "/retry", id: "retry-failure", summary: "Retry a failed entry: it goes back into its queue",
		scope: operate, of: ofEntry,
	})
	verb[idVerb](a, operator.DiscardFailure, route{
		path: one + "/discard", id: "discard-failure", summary: "Discard a failure",
		scope: operate, of: ofEntry,
	})
}

type causesFilter struct {
	InQueue
	Since time.Time `query:"since" doc:"Of failures then or later."`
}

type failureFilter struct {
	Paging
	Queue       string    `query:"queue" required:"true" maxLength:"48"`
	Class       string    `query:"class"`
	Fingerprint string    `query:"fingerprint"`
	Flow        string    `query:"flow"`
	LockKey     string    `query:"lock_key"`
	Name        string    `query:"name"`
	Since       time.Time `query:"since" doc:"Failed then or later."`
}

func (a *API) listFailures(ctx context.Context, in *failureFilter) (*answer[list[operator.Failure]], error) {
	return paged(in.Paging, func(before int64, limit int) ([]operator.Failure, error) {
		return a.operator.Failures(ctx, operator.FailureFilter{
			Queue: in.Queue, Class: in.Class, Fingerprint: in.Fingerprint, Flow: in.Flow, LockKey: in.LockKey,
			Name: in.Name, Since: in.Since, Before: before, Limit: limit,
		})
	}, func(f operator.Failure) int64 { return f.ID })
}
