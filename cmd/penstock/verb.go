package main

import (
	"context"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// verbRoutes are the routes of the verbs on one thing. They are POST but those of verbs that remove a thing.
var verbRoutes = map[operator.Verb]string{
	operator.PauseQueue:      "/v1/queues/%v/pause",
	operator.ResumeQueue:     "/v1/queues/%v/resume",
	operator.DisableQueue:    "/v1/queues/%v/disable",
	operator.EnableQueue:     "/v1/queues/%v/enable",
	operator.DisableEntry:    "/v1/entries/%v/disable",
	operator.EnableEntry:     "/v1/entries/%v/enable",
	operator.RetryFailure:    "/v1/failures/%v/retry",
	operator.DiscardFailure:  "/v1/failures/%v/discard",
	operator.CancelOperation: "/v1/operations/%v/cancel",
	operator.DrainNode:       "/v1/nodes/%v/drain",
	operator.PauseCronJob:    "/v1/cron/%v/pause",
	operator.ResumeCronJob:   "/v1/cron/%v/resume",
	operator.RunCronJob:      "/v1/cron/%v/run",
	operator.DropCronJob:     "/v1/cron/%v",
	operator.PauseBatch:      "/v1/batches/%v/pause",
	operator.ResumeBatch:     "/v1/batches/%v/resume",
	operator.CancelBatch:     "/v1/batches/%v/cancel",
	operator.RetryBatch:      "/v1/batches/%v/retry",
	operator.RemoveModel:     "/v1/models/%v",

	operator.CancelRequestBatch: "/v1/gateway/batches/%v/cancel",
}

// carryOut does a verb on the thing of a name or an id. Until, if not zero, is when a pause ends by itself. It returns
// what is worth telling.
func (c conn) carryOut(ctx context.Context, v operator.Verb, thing any, by invalidation.By, until operator.Moment,
) (string, error) {
	path := at(verbRoutes[v], thing)
	switch {
	case v == operator.DropCronJob || v == operator.RemoveModel:
		return "", c.remove(ctx, path, by)
	case v.Pauses():
		return c.pause(ctx, path, body(by, "until", until))
	}
	return "", c.post(ctx, path, body(by))
}

// pause sends a pause, and tells which one it has replaced.
func (c conn) pause(ctx context.Context, path string, in any) (string, error) {
	answer, err := posted[struct{ Replaced *operator.Replaced }](ctx, c, path, in)
	if err != nil || answer.Replaced == nil {
		return "", err
	}
	return "done, in place of " + answer.Replaced.String(), nil
}
