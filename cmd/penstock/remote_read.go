package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// Queues reads queues that are named one by one, as they stand, and all as the leader sampled them.
func (r remote) Queues(ctx context.Context, names ...string) ([]operator.Queue, error) {
	if len(names) == 0 {
		return list[operator.Queue](ctx, r, "/v1/queues", operator.PageMax, "")
	}
	var found []operator.Queue
	for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
		switch q, err := r.Queue(ctx, name); {
		case err == nil:
			found = append(found, q.Queue)
		case !errors.Is(err, invalidation.ErrQueueNotFound):
			return nil, err
		}
	}
	return found, nil
}

func (r remote) Queue(ctx context.Context, name string) (operator.QueueDetail, error) {
	return read[operator.QueueDetail](ctx, r, address("/v1/queues/%v", name))
}

// Samples asks for whole minutes, which is what the API counts in.
func (r remote) Samples(ctx context.Context, queue string, over time.Duration) ([]operator.Sample, error) {
	minutes := int((over + time.Minute - 1) / time.Minute)
	return some[operator.Sample](ctx, r, address("/v1/queues/%v/samples", queue)+query("minutes", minutes), operator.PageMax)
}

func (r remote) QueueNames(ctx context.Context, prefix string) ([]string, error) {
	all, err := r.Queues(ctx)
	var names []string
	for _, q := range all {
		if strings.HasPrefix(q.Name, prefix) {
			names = append(names, q.Name)
		}
	}
	return names, err
}

func (r remote) Groups(ctx context.Context, queue, after string, limit int) ([]operator.Group, error) {
	return list[operator.Group](ctx, r, "/v1/groups", limit, behind(after), "queue", queue)
}

func (r remote) Failures(ctx context.Context, f operator.FailureFilter) ([]operator.Failure, error) {
	return list[operator.Failure](ctx, r, "/v1/failures", f.Limit, behind(f.Before),
		"queue", f.Queue, "class", f.Class, "fingerprint", f.Fingerprint, "flow", f.Flow, "lock_key", f.LockKey, "name", f.Name)
}

func (r remote) Failure(ctx context.Context, id int64) (operator.FailureDetail, error) {
	return read[operator.FailureDetail](ctx, r, address("/v1/failures/%v", id))
}

func (r remote) Causes(ctx context.Context, queue string, limit int) ([]operator.Cause, error) {
	return some[operator.Cause](ctx, r, address("/v1/queues/%v/causes", queue), limit)
}

func (r remote) Operations(ctx context.Context, f operator.OperationFilter) ([]operator.Operation, error) {
	return list[operator.Operation](ctx, r, "/v1/operations", f.Limit, behind(f.Before), "queue", f.Queue, "running", f.Running)
}

func (r remote) Operation(ctx context.Context, id int64) (operator.Operation, error) {
	return read[operator.Operation](ctx, r, address("/v1/operations/%v", id))
}

func (r remote) Locks(ctx context.Context, f operator.LockFilter) ([]operator.Lock, error) {
	return list[operator.Lock](ctx, r, "/v1/locks", f.Limit, behind(f.After), "queue", f.Queue, "node", int64(f.NodeID))
}

func (r remote) VerifyLocks(ctx context.Context, limit int) ([]operator.Suspect, error) {
	return some[operator.Suspect](ctx, r, "/v1/locks/suspects", limit)
}

func (r remote) Nodes(ctx context.Context, limit int) ([]operator.Node, error) {
	return list[operator.Node](ctx, r, "/v1/nodes", limit, "")
}

func (r remote) Limits(ctx context.Context, limit int) ([]operator.Limit, error) {
	return list[operator.Limit](ctx, r, "/v1/limits", limit, "")
}

func (r remote) Usage(ctx context.Context, queue, afterQueue, afterFlow string, limit int) ([]operator.Usage, error) {
	return list[operator.Usage](ctx, r, "/v1/usage", limit, behind([2]string{afterQueue, afterFlow}), "queue", queue)
}

func (r remote) Audits(ctx context.Context, f operator.AuditFilter) ([]operator.Audit, error) {
	since := ""
	if !f.Since.IsZero() {
		since = f.Since.Format(time.RFC3339Nano)
	}
	return list[operator.Audit](ctx, r, "/v1/audit", f.Limit, behind(f.Before), "actor", f.Actor, "verb", f.Verb, "object", f.Object, "since", since)
}

func (r remote) CronJobs(ctx context.Context, f operator.CronFilter) ([]operator.CronJob, error) {
	return list[operator.CronJob](ctx, r, "/v1/cron", f.Limit, behind(f.After), "queue", f.Queue)
}

func (r remote) CronJob(ctx context.Context, name string) (operator.CronJobDetail, error) {
	return read[operator.CronJobDetail](ctx, r, address("/v1/cron/%v", name))
}

func (r remote) Batches(ctx context.Context, f operator.BatchFilter) ([]operator.Batch, error) {
	return list[operator.Batch](ctx, r, "/v1/batches", f.Limit, behind(f.Before), "queue", f.Queue)
}

func (r remote) Batch(ctx context.Context, id int64) (operator.Batch, error) {
	return read[operator.Batch](ctx, r, address("/v1/batches/%v", id))
}

func (r remote) Pauses(ctx context.Context, limit int) ([]operator.Pause, error) {
	return list[operator.Pause](ctx, r, "/v1/pauses", limit, "")
}

func (r remote) Applications(ctx context.Context, limit int) ([]operator.Application, error) {
	return list[operator.Application](ctx, r, "/v1/applications", limit, "")
}

func (r remote) Models(ctx context.Context, limit int) ([]operator.Model, error) {
	return list[operator.Model](ctx, r, "/v1/models", limit, "")
}

func (r remote) Instances(ctx context.Context, model string, limit int) ([]operator.Instance, error) {
	return list[operator.Instance](ctx, r, "/v1/instances", limit, "", "model", model)
}

func (r remote) Tokens(ctx context.Context, limit int) ([]operator.APIToken, error) {
	return list[operator.APIToken](ctx, r, "/v1/tokens", limit, "")
}

// Snapshot computes the rates here: only the caller knows what it saw before.
func (r remote) Snapshot(ctx context.Context, earlier *operator.Snapshot) (*operator.Snapshot, error) {
	s, err := read[operator.Snapshot](ctx, r, "/v1/snapshot")
	if err != nil {
		return nil, err
	}
	s.Rates = operator.Rates(earlier, &s)
	return &s, nil
}
