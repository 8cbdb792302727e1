package api

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale"
)

// InDeployment is the input of requests about one deployment.
type InDeployment struct {
	Deployment string `path:"deployment" maxLength:"63"`
}

// scaleRoutes let an operator stop or override scaling; a deployment itself is configuration.
func (a *API) scaleRoutes() {
	const one = "/v1/scale/deployments/{deployment}"
	add(a, route{
		method: "GET", path: "/v1/scale/deployments", id: "list-deployments",
		summary: "Deployments by name, with the newest decision about their models",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.Deployment]], error) {
		return paged(*in, func(after string, limit int) ([]operator.Deployment, error) {
			return a.operator.Deployments(ctx, after, limit)
		}, func(d operator.Deployment) string { return d.Name })
	})
	add(a, route{
		method: "GET", path: one, id: "show-deployment",
		summary: "One deployment, and why its model has this number of instances",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *InDeployment) (*tagged[operator.DeploymentDetail], error) {
		found, err := a.operator.Deployment(ctx, in.Deployment)
		return &tagged[operator.DeploymentDetail]{deploymentTag(found), found}, err
	})
	change(a, route{
		method: "PUT", path: one, id: "set-deployment",
		summary: "Create a deployment of a model, or change the given settings",
		scope:   admin, of: ofPlatform,
	}, a.setDeployment)
	change(a, route{
		method: "DELETE", path: one, id: "remove-deployment",
		summary: "Remove a deployment; its instances stay",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		InDeployment
		ReasonQuery
	},
	) error {
		return a.operator.RemoveDeployment(ctx, in.Deployment, in.by(ctx))
	})
	add(a, route{
		method: "GET", path: "/v1/scale/decisions", id: "list-scale-decisions",
		summary: "Decisions that changed a number of instances, newest first",
		scope:   read, of: ofPlatform,
	}, a.listScaleDecisions)
	change(a, route{
		method: "PUT", path: "/v1/scale/override", id: "override-deployment",
		summary: "Set the number of instances of a deployment until a time",
		scope:   operate, of: ofPlatform,
	}, a.overrideDeployment)
	change(a, route{
		method: "DELETE", path: "/v1/scale/override", id: "end-deployment-override",
		summary: "End the override of a deployment; its policy decides again",
		scope:   operate, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		ReasonQuery
		Deployment string `query:"deployment" required:"true" minLength:"1" maxLength:"63"`
	},
	) error {
		return a.operator.SetScaleOverride(ctx, in.Deployment, nil, time.Time{}, in.by(ctx))
	})
	add(a, route{
		method: "GET", path: "/v1/scale/settings", id: "list-scale-settings",
		summary: "Switches of all autoscaling that are set",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.ScaleSetting]], error) {
		found, err := a.operator.ScaleSettings(ctx)
		return pageFrom(found, err, *in, func(s operator.ScaleSetting) string { return s.Name })
	})
	change(a, route{
		method: "PUT", path: "/v1/scale/settings", id: "set-scale-settings",
		summary: "Set switches of all autoscaling: scale.off, scale.zero_off, scale.max_all, scale.budget",
		scope:   operate, of: ofPlatform,
	}, func(ctx context.Context, in *struct{ Body settingsBody }) error {
		return a.operator.SetScaleSettings(ctx, in.Body.Settings, in.Body.by(ctx))
	})
}

// scaleRecordRoutes are about what was recorded of models.
func (a *API) scaleRecordRoutes() {
	add(a, route{
		method: "GET", path: "/v1/scale/minutes", id: "list-scale-minutes",
		summary: "Use of a model by minute, with the decisions about it, oldest first",
		scope:   read, of: ofPlatform,
	}, a.listScaleMinutes)
	add(a, route{
		method: "POST", path: "/v1/scale/simulate", id: "simulate-scale-policy",
		summary: "Decisions of another policy over the recorded minutes of a model",
		scope:   read, of: ofPlatform, status: 200,
	}, a.simulateScalePolicy)
}

// deploymentTag is about what set-deployment sets.
func deploymentTag(d operator.DeploymentDetail) string {
	text, _ := json.Marshal([]any{d.Model, d.Backend, d.Mode, d.Cost, d.FillOrder})
	return etag(text, d.Policy, d.Target, d.Template)
}

type deploymentSetting struct {
	InDeployment
	Conditional
	Body struct {
		ReasonBody
		Model    string         `json:"model" minLength:"1" maxLength:"200"`
		Settings map[string]any `json:"settings,omitempty" doc:"Those of a deployment, such as policy and mode."`
	}
}

func (a *API) setDeployment(ctx context.Context, in *deploymentSetting) error {
	if _, err := readPolicy(in.Body.Settings["policy"]); err != nil {
		return err
	}
	return a.alter(ctx, in.Conditional, operator.ObjectDeployment, in.Deployment,
		func(d *operator.Database) (string, error) {
			found, err := d.Deployment(ctx, in.Deployment)
			return deploymentTag(found), err
		},
		func(d *operator.Database) error {
			return d.SetDeployment(ctx, in.Deployment, in.Body.Model, in.Body.Settings, in.Body.by(ctx))
		})
}

// readPolicy refuses a policy with which the leader could not decide. An absent one has the defaults.
func readPolicy(given any) (policy scale.Policy, err error) {
	text, err := json.Marshal(given)
	if err == nil {
		policy, err = scale.ParsePolicy(text)
	}
	if err != nil {
		return policy, fmt.Errorf("%w: %w", errInvalid, err)
	}
	return policy, nil
}

type decisionFilter struct {
	Paging
	Model string `query:"model" maxLength:"200"`
}

func (a *API) listScaleDecisions(
	ctx context.Context, in *decisionFilter,
) (*answer[list[operator.ScaleDecision]], error) {
	return paged(in.Paging, func(before operator.ScaleDecisionKey, limit int) ([]operator.ScaleDecision, error) {
		return a.operator.ScaleDecisions(ctx, operator.ScaleDecisionFilter{
			Model: in.Model, Before: before, Limit: limit,
		})
	}, func(d operator.ScaleDecision) operator.ScaleDecisionKey {
		return operator.ScaleDecisionKey{At: d.At, Model: d.Model}
	})
}

type deploymentOverride struct {
	Body struct {
		ReasonBody
		Deployment string `json:"deployment" minLength:"1" maxLength:"63"`
		Instances  int    `json:"instances" minimum:"0" maximum:"1400"`
		Until      Moment `json:"until" doc:"When it ends: a time, or a duration from now such as 2h."`
	}
}

func (a *API) overrideDeployment(ctx context.Context, in *deploymentOverride) error {
	b := in.Body
	until, err := a.operator.At(ctx, b.Until.Moment)
	if err != nil {
		return err
	}
	return a.operator.SetScaleOverride(ctx, b.Deployment, &b.Instances, until, b.by(ctx))
}
