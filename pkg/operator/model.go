package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Model is a model with its protocol and configuration.
type Model struct {
	Name      string          `json:"name"`
	Protocol  string          `json:"protocol"`
	Queue     string          `json:"queue"`
	Config    json.RawMessage `json:"config"`
	Override  json.RawMessage `json:"override,omitempty"` // fields that replace those of config
	Instances int64           `json:"instances"`
	Usable    int64           `json:"usable"` // instances to which calls may be sent
	Slots     int64           `json:"slots"`  // of those
	Held      int64           `json:"held"`
	ChangedAt time.Time       `json:"changed_at"`
}

const modelColumns = `
SELECT m.name, coalesce((coalesce(m.config, '{}') || coalesce(m.override, '{}'))->>'protocol', '') AS protocol,
       penstock.model_queue(m.name) AS queue,
       m.config, m.override, i.instances, i.usable, i.slots, i.held, m.changed_at
  FROM penstock.model m
 CROSS JOIN LATERAL (
       SELECT count(*) AS instances, count(*) FILTER (WHERE s.usable) AS usable,
              coalesce(sum(s.slots) FILTER (WHERE s.usable), 0)::bigint AS slots,
              coalesce(sum(s.held), 0)::bigint AS held
         FROM penstock.instance_status s WHERE s.model = m.name) i`

const modelsSQL = modelColumns + ` WHERE m.name > $1 ORDER BY m.name LIMIT $2`

// Models returns the models by name, from the first behind the given one.
func (d *Database) Models(ctx context.Context, after string, limit int) ([]Model, error) {
	return list[Model](ctx, d.db, "models", modelsSQL, after, page(limit))
}

// Model returns one model, or ErrNotFound.
func (d *Database) Model(ctx context.Context, name string) (Model, error) {
	const sql = modelColumns + ` WHERE m.name = $1`
	return show[Model](ctx, d.db, fmt.Sprintf("model %q", name), invalidation.ErrNotFound, sql, name)
}

// RegisterModel registers a model, or replaces its config, and returns its queue.
func (d *Database) RegisterModel(ctx context.Context, name string, config []byte,
	by invalidation.By,
) (queue string, err error) {
	const sql = `SELECT penstock.register_model($1, $2::jsonb, $3, $4)`
	if err := d.db.QueryRow(ctx, sql, name, config, by.Reason, given(by.Actor)).Scan(&queue); err != nil {
		return "", fmt.Errorf("register model %q: %w", name, invalidation.Translate(err))
	}
	return queue, nil
}

// OverrideModel replaces fields of a model's config on all nodes at once; nil removes the override.
func (d *Database) OverrideModel(ctx context.Context, name string, override []byte, by invalidation.By) error {
	return d.change(ctx, fmt.Sprintf("override model %q", name),
		`SELECT penstock.set_model_override($3, $4::jsonb, $1, $2)`, by, name, override)
}

// Instance is an endpoint of a model.
type Instance struct {
	Model            string          `json:"model"`
	Server           string          `json:"server"`
	Endpoint         string          `json:"endpoint"`
	State            string          `json:"state" doc:"By the last probe: unknown, starting, ready, busy, unhealthy or defunct."`
	Usable           bool            `json:"usable"`
	Slots            int32           `json:"slots"`
	Held             int64           `json:"held"`
	Doubtful         int64           `json:"doubtful"` // held slots in doubt: a call of a lost node may still run
	Active           *int32          `json:"active,omitempty"`
	Queued           *int32          `json:"queued,omitempty"`
	Draining         bool            `json:"draining"`
	Reason           string          `json:"reason,omitempty"`
	QuarantinedUntil *time.Time      `json:"quarantined_until,omitempty"`
	CheckedAt        *time.Time      `json:"checked_at,omitempty"`
	Labels           json.RawMessage `json:"labels"`
}

// InstanceKey is the position of an Instance in the list.
type InstanceKey struct{ Model, Server string }

const instanceColumns = `
SELECT model, server, endpoint, state, usable, slots, held, doubtful, active, queued, draining,
       coalesce(reason, '') AS reason,
       quarantined_until, checked_at, labels
  FROM penstock.instance_status`

const instancesSQL = instanceColumns + `
 WHERE ($1::text IS NULL OR model = $1) AND (model, server) > ($2, $3)
 ORDER BY model, server
 LIMIT $4`

// Instances returns the instances of a model, of all if it is empty, by model and server, from the first behind the
// given key.
func (d *Database) Instances(ctx context.Context, model string, after InstanceKey, limit int) ([]Instance, error) {
	return list[Instance](ctx, d.db, "instances", instancesSQL, given(model), after.Model, after.Server, page(limit))
}

// Instance returns one instance of a model, or ErrNotFound.
func (d *Database) Instance(ctx context.Context, model, server string) (Instance, error) {
	const sql = instanceColumns + ` WHERE model = $1 AND server = $2`
	what := fmt.Sprintf("instance %q of model %q", server, model)
	return show[Instance](ctx, d.db, what, invalidation.ErrNotFound, sql, model, server)
}

// RegisterInstance registers an endpoint or changes it; it ends a drain and a quarantine.
func (d *Database) RegisterInstance(ctx context.Context, i Instance, by invalidation.By) error {
	const sql = `SELECT penstock.register_instance($3, $4, $5, $6, coalesce($7::jsonb, '{}'), $1, $2)`
	return d.change(ctx, fmt.Sprintf("register instance %s of model %q", i.Server, i.Model), sql, by, i.Model, i.Server,
		i.Endpoint, i.Slots, i.Labels)
}

// DrainInstance sends an instance no new calls; those in flight end.
func (d *Database) DrainInstance(ctx context.Context, model, server string, by invalidation.By) error {
	return d.change(ctx, fmt.Sprintf("drain instance %s of model %q", server, model),
		`SELECT penstock.drain_instance($3, $4, $1, $2)`, by, model, server)
}

// RemoveInstance deletes an instance. It refuses while slots of it are held, unless forced. One of a deployment drains
// until its backend has removed it.
func (d *Database) RemoveInstance(ctx context.Context, model, server string, force bool, by invalidation.By) error {
	return d.change(ctx, fmt.Sprintf("remove instance %s of model %q", server, model),
		`SELECT penstock.remove_instance($3, $4, $5, $1, $2)`, by, model, server, force)
}
