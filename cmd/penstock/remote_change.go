package main

import (
	"context"
	"encoding/json"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// verbAddresses say where the API does operator's verbs.
var verbAddresses = map[operator.Verb]string{
	operator.PauseQueue: "/v1/queues/%v/pause", operator.ResumeQueue: "/v1/queues/%v/resume",
	operator.DisableQueue: "/v1/queues/%v/disable", operator.EnableQueue: "/v1/queues/%v/enable",
	operator.DisableEntry: "/v1/entries/%v/disable", operator.EnableEntry: "/v1/entries/%v/enable",
	operator.RetryFailure: "/v1/failures/%v/retry", operator.DiscardFailure: "/v1/failures/%v/discard",
	operator.CancelOperation: "/v1/operations/%v/cancel", operator.DrainNode: "/v1/nodes/%v/drain",
	operator.PauseCronJob: "/v1/cron/%v/pause", operator.ResumeCronJob: "/v1/cron/%v/resume",
	operator.RunCronJob: "/v1/cron/%v/run", operator.DropCronJob: "/v1/cron/%v",
	operator.PauseBatch: "/v1/batches/%v/pause", operator.ResumeBatch: "/v1/batches/%v/resume",
	operator.CancelBatch: "/v1/batches/%v/cancel", operator.RetryBatch: "/v1/batches/%v/retry",
	operator.RemoveModel: "/v1/models/%v",
}

func (r remote) Do(ctx context.Context, v operator.Verb, thing any, by invalidation.By, until time.Time) error {
	path := address(verbAddresses[v], thing)
	if v == operator.DropCronJob || v == operator.RemoveModel {
		return r.remove(ctx, path, by)
	}
	return r.post(ctx, path, because(by, "until", until), nil)
}

func (r remote) CreateQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return r.post(ctx, "/v1/queues", because(by, "name", name, "settings", options), nil)
}

func (r remote) AlterQueue(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return r.change(ctx, "PATCH", address("/v1/queues/%v", name), because(by, "settings", options))
}

func (r remote) DropQueue(ctx context.Context, name string, force bool, by invalidation.By) error {
	return r.remove(ctx, address("/v1/queues/%v", name), by, "force", force)
}

// remove sends a DELETE, whose reason stands in the address.
func (r remote) remove(ctx context.Context, path string, by invalidation.By, more ...any) error {
	return r.do(ctx, client.Call{Method: "DELETE", Path: path + query(append(more, "reason", by.Reason)...)}, nil)
}

func (r remote) Compact(ctx context.Context, queue, key, after string, by invalidation.By) (replaced int, next string, err error) {
	var answer struct {
		Replaced int    `json:"replaced"`
		Next     string `json:"next"`
	}
	err = r.post(ctx, address("/v1/queues/%v/compact", queue), because(by, "lock_key", key, "after", after), &answer)
	return answer.Replaced, answer.Next, err
}

func (r remote) SetLimit(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return r.put(ctx, address("/v1/limits/%v", name), because(by, "settings", options), nil)
}

func (r remote) UseLimit(ctx context.Context, queue, limit string, units int, by invalidation.By) error {
	return r.put(ctx, address("/v1/queues/%v/limits/%v", queue, limit), because(by, "units", units), nil)
}

func (r remote) SetFlowWeight(ctx context.Context, flow, queue string, weight float64, by invalidation.By) error {
	return r.post(ctx, "/v1/flows/weight"+query("queue", queue), because(by, "flow", flow, "weight", weight), nil)
}

func (r remote) CreateCronJob(ctx context.Context, name, queue, spec string, options map[string]any, by invalidation.By) error {
	return r.post(ctx, address("/v1/queues/%v/cron", queue), because(by, "name", name, "spec", spec, "settings", options), nil)
}

func (r remote) AlterCronJob(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return r.change(ctx, "PATCH", address("/v1/cron/%v", name), because(by, "settings", options))
}

func (r remote) CreateBatch(ctx context.Context, name, queue string, options map[string]any, by invalidation.By) (int64, error) {
	var made struct {
		ID int64 `json:"id"`
	}
	err := r.post(ctx, address("/v1/queues/%v/batches", queue), because(by, "name", name, "options", options), &made)
	return made.ID, err
}

func (r remote) Pause(ctx context.Context, s operator.Subject, by invalidation.By, until time.Time) error {
	return r.post(ctx, "/v1/pauses"+query("queue", s.Queue), because(by, "scope", s.Scope, "value", s.Value, "until", until), nil)
}

func (r remote) Resume(ctx context.Context, s operator.Subject, by invalidation.By) error {
	return r.remove(ctx, "/v1/pauses", by, "queue", s.Queue, "scope", s.Scope, "value", s.Value)
}

func (r remote) SetQuota(ctx context.Context, application string, l *operator.Quota, by invalidation.By) error {
	path := address("/v1/applications/%v/quota", application)
	if l == nil {
		return r.change(ctx, "DELETE", path+query("reason", by.Reason), nil)
	}
	return r.put(ctx, path, because(by, "max_units", l.MaxUnits, "rate", l.Rate, "burst", l.Burst), nil)
}

func (r remote) RegisterModel(ctx context.Context, name string, config []byte, by invalidation.By) (string, error) {
	var made struct {
		Queue string `json:"queue"`
	}
	err := r.put(ctx, address("/v1/models/%v", name), because(by, "config", json.RawMessage(config)), &made)
	return made.Queue, err
}

func (r remote) OverrideModel(ctx context.Context, name string, override []byte, by invalidation.By) error {
	path := address("/v1/models/%v/override", name)
	if override == nil {
		return r.change(ctx, "DELETE", path+query("reason", by.Reason), nil)
	}
	return r.change(ctx, "PUT", path, because(by, "override", json.RawMessage(override)))
}

func (r remote) RegisterInstance(ctx context.Context, i operator.Instance, by invalidation.By) error {
	return r.put(ctx, address("/v1/instances/%v/%v", i.Model, i.Server), because(by, "endpoint", i.Endpoint, "slots", i.Slots, "labels", i.Labels), nil)
}

func (r remote) DrainInstance(ctx context.Context, model, server string, by invalidation.By) error {
	return r.post(ctx, address("/v1/instances/%v/%v/drain", model, server), because(by), nil)
}

func (r remote) RemoveInstance(ctx context.Context, model, server string, force bool, by invalidation.By) error {
	return r.remove(ctx, address("/v1/instances/%v/%v", model, server), by, "force", force)
}

// answered is a secret, which cannot be read again.
type answered struct {
	Secret string `json:"secret"`
}

func (r remote) CreateToken(ctx context.Context, g operator.Grant, by invalidation.By) (string, error) {
	var made answered
	err := r.post(ctx, "/v1/tokens", because(by, "name", g.Name, "scopes", g.Scopes, "applications", g.Applications, "queues", g.Queues, "expires_at", g.ExpiresAt), &made)
	return made.Secret, err
}

func (r remote) RotateToken(ctx context.Context, name string, overlap time.Duration, expires time.Time, by invalidation.By) (string, error) {
	var made answered
	err := r.post(ctx, address("/v1/tokens/%v/rotate", name), because(by, "overlap_seconds", overlap.Seconds(), "expires_at", expires), &made)
	return made.Secret, err
}

func (r remote) RevokeToken(ctx context.Context, name string, by invalidation.By) error {
	return r.post(ctx, address("/v1/tokens/%v/revoke", name), because(by), nil)
}
