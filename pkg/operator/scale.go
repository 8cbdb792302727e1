package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Deployment is a kind of instances of a model, and how their number is decided.
type Deployment struct {
	Name          string          `json:"name"`
	Model         string          `json:"model"`
	Backend       string          `json:"backend"` // advise, keda, local, webhook, kubernetes
	Mode          string          `json:"mode" doc:"full, up-only, manual, advise or disabled."`
	Policy        json.RawMessage `json:"policy"`
	Target        json.RawMessage `json:"target"`
	Template      json.RawMessage `json:"template,omitempty"`
	TemplateHash  string          `json:"template_hash,omitempty"`
	Cost          float64         `json:"cost"` // of an instance an hour
	FillOrder     int32           `json:"fill_order"`
	Decides       bool            `json:"decides"` // it is filled first: its policy decides the number of the model
	Override      *int32          `json:"override,omitempty"`
	OverrideUntil *time.Time      `json:"override_until,omitempty"`
	Overridden    bool            `json:"overridden" doc:"There is an override, and it has not ended, by the database's clock."`
	OverrideBy    string          `json:"override_by,omitempty"`
	OnDemand      bool            `json:"on_demand"`
	CreatedAt     time.Time       `json:"created_at"`
	ChangedAt     time.Time       `json:"changed_at"`
	State         *ScaleState     `json:"state,omitempty"`  // of the model; absent before the first decision
	Orders        *ScaleOrders    `json:"orders,omitempty"` // to the backend; absent where the leader drives none
	Instances     int             `json:"instances"`        // of the deployment, that are registered
	Ready         int             `json:"ready"`            // of these
	Draining      int             `json:"draining"`         // of these
}

// ScaleOrders is the last order to the backend of a deployment, and its answer.
type ScaleOrders struct {
	Desired   int        `json:"desired"`  // its share of the instances of the model
	Order     int64      `json:"order_id"` // grows with each change
	Ordered   int        `json:"ordered"`  // instances that are to exist, those that drain included
	OrderedAt *time.Time `json:"ordered_at"`
	Applied   int64      `json:"applied_id"` // the newest order that the backend accepted
	AppliedAt *time.Time `json:"applied_at"`
	Existing  *int       `json:"existing"` // as the backend reported at SeenAt; null where it never did
	SeenAt    *time.Time `json:"seen_at"`
	Failures  int        `json:"failures"` // in a row
	RetryAt   *time.Time `json:"retry_at"`
	Error     *string    `json:"error"` // of the last failure
}

// ScaleState is the newest decision about a model that is stored: one that changed the number, or one
// of the last 5 seconds.
type ScaleState struct {
	Desired    int       `json:"desired"`
	Base       int       `json:"base"`       // the least number that would have sufficed all along
	Raw        int       `json:"raw"`        // with the instances that the backlog needs
	Stabilised int       `json:"stabilised"` // after the hold
	Ready      int       `json:"ready"`
	Metric     float64   `json:"metric"` // requests that run and that may start
	Why        string    `json:"why"`
	DecidedAt  time.Time `json:"decided_at"`
}

// ScaleDecision is a decision that changed the number of instances of a model.
type ScaleDecision struct {
	At         time.Time       `json:"at"`
	Model      string          `json:"model"`
	Before     int32           `json:"before"`
	Desired    int32           `json:"desired"`
	Base       int32           `json:"base"`
	Raw        int32           `json:"raw"`
	Stabilised int32           `json:"stabilised"`
	Ready      int32           `json:"ready"`
	Applied    bool            `json:"applied"` // false in mode advise
	Notes      json.RawMessage `json:"notes"`   // the reasons, each a code and its numbers, in the order of the steps
	Why        string          `json:"why"`     // the same in words
}

// DeploymentDetail is a deployment with the last decision that changed the number of its model.
type DeploymentDetail struct {
	Deployment
	LastChange *ScaleDecision `json:"last_change,omitempty"`
}

// deploymentsSQL finds for each model the deployment that is filled first in the same order as
// penstock.scale_input.
const deploymentsSQL = `
SELECT d.name, d.model, d.backend, d.mode, d.policy, d.target, d.template,
       coalesce(d.template_hash, '') AS template_hash, d.cost, d.fill_order, d.decides,
       d.override, penstock.json_time(d.override_until) AS override_until,
       coalesce(d.override_until > clock_timestamp(), false) AS overridden, coalesce(d.override_by, '') AS override_by,
       d.on_demand, d.created_at, d.changed_at,
       CASE WHEN s.model IS NOT NULL THEN to_jsonb(s) - ARRAY['model', 'state', 'counters', 'arrived'] END AS state,
       CASE WHEN o.name IS NOT NULL THEN jsonb_build_object('desired', o.desired, 'order_id', o.order_id,
            'ordered', o.ordered, 'ordered_at', o.ordered_at, 'applied_id', o.applied_id, 'applied_at', o.applied_at,
            'existing', o.existing, 'seen_at', o.seen_at, 'failures', o.failures, 'retry_at', o.retry_at,
            'error', o.error) END AS orders, i.instances, i.ready, i.draining
  FROM (SELECT x.*, row_number() OVER (PARTITION BY x.model ORDER BY x.fill_order, x.cost, x.name) = 1 AS decides
          FROM penstock.deployment x) d
  LEFT JOIN penstock.scale_state s ON s.model = d.model
  LEFT JOIN penstock.deployment_state o ON o.name = d.name
 CROSS JOIN LATERAL (
       SELECT count(*) AS instances, count(*) FILTER (WHERE penstock.usable(n)) AS ready,
              count(*) FILTER (WHERE n.draining_at IS NOT NULL) AS draining
         FROM penstock.instance n WHERE n.deployment = d.name) i`

// Deployments returns the deployments by name, those after the given one.
func (d *Database) Deployments(ctx context.Context, after string, limit int) ([]Deployment, error) {
	const sql = deploymentsSQL + ` WHERE d.name > $1 ORDER BY d.name LIMIT $2`
	return list[Deployment](ctx, d.db, "deployments", sql, after, page(limit))
}

// Deployment returns one deployment with the last decision that changed the number of its model, or
// invalidation.ErrNotFound.
func (d *Database) Deployment(ctx context.Context, name string) (DeploymentDetail, error) {
	const sql = deploymentsSQL + ` WHERE d.name = $1`
	what := fmt.Sprintf("deployment %q", name)
	found, err := show[Deployment](ctx, d.db, what, invalidation.ErrNotFound, sql, name)
	if err != nil {
		return DeploymentDetail{}, err
	}
	detail := DeploymentDetail{Deployment: found}
	changes, err := d.ScaleDecisions(ctx, ScaleDecisionFilter{Model: found.Model, Limit: 1})
	if err == nil && len(changes) > 0 {
		detail.LastChange = &changes[0]
	}
	return detail, err
}

// ScaleDecisionKey is the position of a decision in the list.
type ScaleDecisionKey struct {
	At    time.Time `json:"at"`
	Model string    `json:"model"`
}

// ScaleDecisionFilter chooses decisions; all fields that are set must match.
type ScaleDecisionFilter struct {
	Model  string
	Before ScaleDecisionKey // the last row of the page before
	Limit  int
}

const scaleDecisionsSQL = `
SELECT at, model, before, desired, base, raw, stabilised, ready, applied, notes, why
  FROM penstock.scale_decision
 WHERE ($1::text IS NULL OR model = $1) AND ($2::timestamptz IS NULL OR (at, model) < ($2, $3))
 ORDER BY at DESC, model DESC
 LIMIT $4`

// ScaleDecisions returns the decisions that changed a number of instances, the newest first.
func (d *Database) ScaleDecisions(ctx context.Context, f ScaleDecisionFilter) ([]ScaleDecision, error) {
	return list[ScaleDecision](ctx, d.db, "decisions of scaling", scaleDecisionsSQL,
		given(f.Model), given(f.Before.At), f.Before.Model, page(f.Limit))
}

// SetDeployment makes a deployment of a model, or changes the options that are given: backend, target,
// policy, template, cost, fill_order, mode.
func (d *Database) SetDeployment(
	ctx context.Context, name, model string, options map[string]any, by invalidation.By,
) error {
	if options == nil {
		options = map[string]any{}
	}
	const sql = `SELECT penstock.set_deployment($3, $4, $5, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("set deployment %q", name), sql, by, name, model, options)
}

// RemoveDeployment forgets a deployment. Its instances stay.
func (d *Database) RemoveDeployment(ctx context.Context, name string, by invalidation.By) error {
	const sql = `SELECT penstock.remove_deployment($3, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("remove deployment %q", name), sql, by, name)
}

// SetScaleOverride sets the number of instances of a deployment, 0 to 1,400, until a time to come; nil
// ends the override.
func (d *Database) SetScaleOverride(
	ctx context.Context, name string, instances *int, until time.Time, by invalidation.By,
) error {
	const sql = `SELECT penstock.set_scale_override($3, $4, $5, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("override deployment %q", name), sql, by, name, instances, given(until))
}

// ScaleSetting is a switch of all autoscaling that is set.
type ScaleSetting struct {
	Name      string          `json:"name"` // scale.off, scale.zero_off, scale.max_all, scale.budget
	Value     json.RawMessage `json:"value"`
	Actor     string          `json:"actor"`
	Reason    string          `json:"reason"`
	ChangedAt time.Time       `json:"changed_at"`
}

// ScaleSettings returns the switches that are set, by name.
func (d *Database) ScaleSettings(ctx context.Context) ([]ScaleSetting, error) {
	const sql = `
SELECT name, value, actor, reason, changed_at FROM penstock.setting WHERE name LIKE 'scale.%' ORDER BY name`
	return list[ScaleSetting](ctx, d.db, "settings of scaling", sql)
}

// SetScaleSettings sets switches of all autoscaling, all or none of them: scale.off and scale.zero_off
// are booleans, scale.max_all is a number of instances, scale.budget a cost an hour. A nil value removes one.
func (d *Database) SetScaleSettings(ctx context.Context, settings map[string]any, by invalidation.By) error {
	if len(settings) == 0 {
		return fmt.Errorf("%w: settings: give scale.off, scale.zero_off, scale.max_all or scale.budget",
			invalidation.ErrInvalid)
	}
	const sql = `
SELECT penstock.set_scale_setting(s.key, s.value, $1, coalesce($2, current_user)) FROM jsonb_each($3) s ORDER BY s.key`
	return d.change(ctx, "set settings of scaling", sql, by, settings)
}
