package main

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// backend is what the commands need of the system, noun by noun. operator.Database is one that needs no leader; remote
// goes through the HTTP API.
type backend interface {
	Do(ctx context.Context, v operator.Verb, thing any, by invalidation.By, until time.Time) error

	Queues(ctx context.Context, names ...string) ([]operator.Queue, error)
	Queue(ctx context.Context, name string) (operator.QueueDetail, error)
	Samples(ctx context.Context, queue string, over time.Duration) ([]operator.Sample, error)
	QueueNames(ctx context.Context, prefix string) ([]string, error)
	CreateQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error
	AlterQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error
	DropQueue(ctx context.Context, name string, force bool, by invalidation.By) error

	Entries(ctx context.Context, f operator.EntryFilter) ([]operator.Entry, error)
	Entry(ctx context.Context, id int64) (operator.EntryDetail, error)
	Outcome(ctx context.Context, id int64) (queue string, ended operator.Ended, err error)
	Explain(ctx context.Context, id int64) (operator.Explanation, error)
	Push(ctx context.Context, queue string, pushes ...invalidation.Push) ([]invalidation.Pushed, error)
	CancelEntry(ctx context.Context, id int64, by invalidation.By) (operator.Cancelled, error)
	SwitchEntries(ctx context.Context, v operator.Verb, queue string, scope operator.Scope, value string, by invalidation.By) (int64, error)

	Groups(ctx context.Context, queue, after string, limit int) ([]operator.Group, error)
	Compact(ctx context.Context, queue, key, after string, by invalidation.By) (replaced int, next string, err error)

	Failures(ctx context.Context, f operator.FailureFilter) ([]operator.Failure, error)
	Failure(ctx context.Context, id int64) (operator.FailureDetail, error)
	Causes(ctx context.Context, queue string, limit int) ([]operator.Cause, error)

	Operations(ctx context.Context, f operator.OperationFilter) ([]operator.Operation, error)
	Operation(ctx context.Context, id int64) (operator.Operation, error)
	CountMatching(ctx context.Context, o operator.OperationRequest) (int64, error)
	StartOperation(ctx context.Context, o operator.OperationRequest) (int64, error)
	Step(ctx context.Context, id int64) (wait time.Duration, err error)

	Locks(ctx context.Context, f operator.LockFilter) ([]operator.Lock, error)
	VerifyLocks(ctx context.Context, limit int) ([]operator.Suspect, error)

	Nodes(ctx context.Context, limit int) ([]operator.Node, error)

	Limits(ctx context.Context, limit int) ([]operator.Limit, error)
	SetLimit(ctx context.Context, name string, options map[string]any, by invalidation.By) error
	UseLimit(ctx context.Context, queue, limit string, units int, by invalidation.By) error

	Usage(ctx context.Context, queue, afterQueue, afterFlow string, limit int) ([]operator.Usage, error)
	SetFlowWeight(ctx context.Context, flow, queue string, weight float64, by invalidation.By) error

	Audits(ctx context.Context, f operator.AuditFilter) ([]operator.Audit, error)

	CronJobs(ctx context.Context, f operator.CronFilter) ([]operator.CronJob, error)
	CronJob(ctx context.Context, name string) (operator.CronJobDetail, error)
	CreateCronJob(ctx context.Context, name, queue, spec string, options map[string]any, by invalidation.By) error
	AlterCronJob(ctx context.Context, name string, options map[string]any, by invalidation.By) error

	Batches(ctx context.Context, f operator.BatchFilter) ([]operator.Batch, error)
	Batch(ctx context.Context, id int64) (operator.Batch, error)
	CreateBatch(ctx context.Context, name, queue string, options map[string]any, by invalidation.By) (int64, error)

	Pauses(ctx context.Context, limit int) ([]operator.Pause, error)
	Pause(ctx context.Context, s operator.Subject, by invalidation.By, until time.Time) error
	Resume(ctx context.Context, s operator.Subject, by invalidation.By) error
	Applications(ctx context.Context, limit int) ([]operator.Application, error)
	SetQuota(ctx context.Context, application string, l *operator.Quota, by invalidation.By) error

	Models(ctx context.Context, limit int) ([]operator.Model, error)
	RegisterModel(ctx context.Context, name string, config []byte, by invalidation.By) (queue string, err error)
	OverrideModel(ctx context.Context, name string, override []byte, by invalidation.By) error

	Instances(ctx context.Context, model string, limit int) ([]operator.Instance, error)
	RegisterInstance(ctx context.Context, i operator.Instance, by invalidation.By) error
	DrainInstance(ctx context.Context, model, server string, by invalidation.By) error
	RemoveInstance(ctx context.Context, model, server string, force bool, by invalidation.By) error

	Tokens(ctx context.Context, limit int) ([]operator.APIToken, error)
	CreateToken(ctx context.Context, g operator.Grant, by invalidation.By) (secret string, err error)
	RotateToken(ctx context.Context, name string, overlap time.Duration, expires time.Time, by invalidation.By) (secret string, err error)
	RevokeToken(ctx context.Context, name string, by invalidation.By) error

	live
}

// live is what top shows.
type live interface {
	Snapshot(ctx context.Context, earlier *operator.Snapshot) (*operator.Snapshot, error)
}
