package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// DeploymentTemplate is the template from which the first request of a model creates a deployment,
// while the model has none.
type DeploymentTemplate struct {
	Model       string          `json:"model"`
	Backend     string          `json:"backend"`
	Target      json.RawMessage `json:"target"`
	Policy      json.RawMessage `json:"policy"`
	Template    json.RawMessage `json:"template,omitempty"`
	Cost        float64         `json:"cost"`
	FillOrder   int32           `json:"fill_order"`
	IdleSeconds float64         `json:"idle_seconds"`         // without instance and request, then the deployment goes
	Deployment  string          `json:"deployment,omitempty"` // that was made from it, if there is one
	ChangedAt   time.Time       `json:"changed_at"`
}

const deploymentTemplatesSQL = `
SELECT t.model, t.backend, t.target, t.policy, t.template, t.cost, t.fill_order,
       extract(epoch FROM t.idle)::float8 AS idle_seconds, coalesce(d.name, '') AS deployment, t.changed_at
  FROM penstock.deployment_template t
  LEFT JOIN LATERAL (SELECT x.name FROM penstock.deployment x WHERE x.model = t.model AND x.on_demand
                      ORDER BY x.name LIMIT 1) d ON true`

// DeploymentTemplates returns the templates by model, those after the given one.
func (d *Database) DeploymentTemplates(ctx context.Context, after string, limit int) ([]DeploymentTemplate, error) {
	const sql = deploymentTemplatesSQL + ` WHERE t.model > $1 ORDER BY t.model LIMIT $2`
	return list[DeploymentTemplate](ctx, d.db, "templates of deployments", sql, after, page(limit))
}

// SetDeploymentTemplate sets the template from which the first request of a model creates a
// deployment: backend, target, policy, template, cost, fill_order, idle_seconds. A field that is
// not given takes its default. A deployment that was made from it follows. Nil options remove the
// template.
func (d *Database) SetDeploymentTemplate(
	ctx context.Context, model string, options map[string]any, by invalidation.By,
) error {
	const sql = `SELECT penstock.set_deployment_template($3, $4, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("set the template of model %q", model), sql, by, model, options)
}

// DeploymentsOf returns the deployments of a model in the order in which they are filled.
func (d *Database) DeploymentsOf(ctx context.Context, model string) ([]Deployment, error) {
	const sql = deploymentsSQL + ` WHERE d.model = $1 ORDER BY d.fill_order, d.cost, d.name`
	return list[Deployment](ctx, d.db, "deployments of model "+model, sql, model)
}
