package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

// scaleTemplateRoutes are about deployments on demand.
func (a *API) scaleTemplateRoutes() {
	const one = "/v1/scale/templates/{model}"
	add(a, route{
		method: "GET", path: "/v1/scale/templates", id: "list-deployment-templates",
		summary: "Templates from which first requests of models create deployments",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.DeploymentTemplate]], error) {
		return paged(*in, func(after string, limit int) ([]operator.DeploymentTemplate, error) {
			return a.operator.DeploymentTemplates(ctx, after, limit)
		}, func(t operator.DeploymentTemplate) string { return t.Model })
	})
	change(a, route{
		method: "PUT", path: one, id: "set-deployment-template",
		summary: "Set the template of the deployment that a model's first request creates; an existing one follows it",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *templateSetting) error {
		if _, err := readPolicy(in.Body.Settings["policy"]); err != nil {
			return err
		}
		settings := in.Body.Settings
		if settings == nil {
			settings = map[string]any{}
		}
		return a.operator.SetDeploymentTemplate(ctx, in.Model, settings, in.Body.by(ctx))
	})
	change(a, route{
		method: "DELETE", path: one, id: "remove-deployment-template",
		summary: "Remove the template of a model; a deployment that was created from it stays until it is idle",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		InTemplate
		ReasonQuery
	},
	) error {
		return a.operator.SetDeploymentTemplate(ctx, in.Model, nil, in.by(ctx))
	})
}

// InTemplate is the input of requests about the template of one model.
type InTemplate struct {
	Model string `path:"model" maxLength:"200"`
}

type templateSetting struct {
	InTemplate
	Body struct {
		ReasonBody
		Settings map[string]any `json:"settings,omitempty" doc:"Those of a deployment, but mode, and idle_seconds."`
	}
}
