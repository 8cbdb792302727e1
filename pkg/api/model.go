package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// InModel is the input of requests about one model, and InServer of one of its instances.
type InModel struct {
	Model string `path:"model" maxLength:"200"`
}

type InServer struct {
	InModel
	Server string `path:"server" maxLength:"200"`
}

// modelRoutes lets no limited token say where nodes call and what they send there: headers name secrets of nodes.
func (a *API) modelRoutes() {
	const one = "/v1/models/{model}"
	add(a, route{
		method: "GET", path: "/v1/models", id: "list-models", summary: "Models by name",
		scope: read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.Model]], error) {
		return paged(*in, func(after string, limit int) ([]operator.Model, error) {
			return a.operator.Models(ctx, after, limit)
		}, func(m operator.Model) string { return m.Name })
	})
	add(a, route{
		method: "GET", path: one, id: "show-model", summary: "One model with its config",
		scope: read, of: ofModel,
	}, func(ctx context.Context, in *InModel) (*tagged[operator.Model], error) {
		found, err := a.operator.Model(ctx, in.Model)
		return &tagged[operator.Model]{etag(found.Config, found.Override), found}, err
	})
	add(a, route{
		method: "PUT", path: one, id: "register-model", summary: "Register a model, or replace its config",
		scope: admin, of: ofPlatform,
	}, a.registerModel)
	verb[modelRemoval](a, operator.RemoveModel, route{
		method: "DELETE", path: one, id: "remove-model", summary: "Remove a model that has no instances",
		scope: admin, of: ofPlatform,
	})
	change(a, route{
		method: "PUT", path: one + "/override", id: "override-model",
		summary: "Override fields of a model's config, for all nodes at once",
		scope:   admin, of: ofPlatform,
	}, a.overrideModel)
	change(a, route{
		method: "DELETE", path: one + "/override", id: "end-override", summary: "Remove the override of a model",
		scope: admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		InModel
		Conditional
		ReasonQuery
	},
	) error {
		return a.override(ctx, in.Conditional, in.Model, nil, ReasonBody{in.Reason})
	})
}

func (a *API) instanceRoutes() {
	const instance = "/v1/instances/{model}/{server}"
	add(a, route{
		method: "GET", path: "/v1/instances", id: "list-instances", summary: "Endpoints of models and their slots",
		scope: read, of: ofModel,
	}, a.listInstances)
	change(a, route{
		method: "PUT", path: instance, id: "register-instance",
		summary: "Register an instance or change it; a drain and a quarantine of it end",
		scope:   admin, of: ofPlatform,
	}, a.registerInstance)
	add(a, route{
		method: "POST", path: instance + "/announce", id: "announce-instance", status: 200,
		summary: "Register an endpoint for a time, or renew that; the answer tells it to serve, to drain or to stop",
		scope:   announce, of: ofModel,
	}, a.announceInstance)
	change(a, route{
		path: instance + "/drain", id: "drain-instance",
		summary: "Drain an instance: it gets no new calls, and those in flight end",
		scope:   operate, of: ofModel,
	}, func(ctx context.Context, in *struct {
		InServer
		Reasoned
	},
	) error {
		return a.operator.DrainInstance(ctx, in.Model, in.Server, in.Body.by(ctx))
	})
	change(a, route{
		method: "DELETE", path: instance, id: "remove-instance",
		summary: "Remove an instance: one of a deployment drains until its backend has removed it",
		scope:   admin, of: ofModel,
	}, func(ctx context.Context, in *struct {
		InServer
		ReasonQuery
		Force bool `query:"force" doc:"Also while slots of it are held."`
	},
	) error {
		return a.operator.RemoveInstance(ctx, in.Model, in.Server, in.Force, in.by(ctx))
	})
}

func modelTag(ctx context.Context, name string) func(*operator.Database) (string, error) {
	return func(d *operator.Database) (string, error) {
		found, err := d.Model(ctx, name)
		return etag(found.Config, found.Override), err
	}
}

type modelRegistration struct {
	InModel
	Conditional
	Body struct {
		ReasonBody
		Config map[string]any `json:"config" doc:"protocol (dispatcher, cog, oip, openai), poll path and interval, timeouts, retries, batch limits."`
	}
}

type registered struct {
	Queue string `json:"queue"`
}

func (a *API) registerModel(ctx context.Context, in *modelRegistration) (*answer[registered], error) {
	config, err := json.Marshal(in.Body.Config)
	if err != nil {
		return nil, err
	}
	found, err := a.operator.Model(ctx, in.Model)
	if err != nil && !errors.Is(err, invalidation.ErrNotFound) {
		return nil, err
	}
	for _, override := range [][]byte{nil, found.Override} { // which stays
		if err := a.checkModel(in.Model, config, override); err != nil {
			return nil, err
		}
	}
	var queue string
	err = a.alter(ctx, in.Conditional, ofModel, in.Model, modelTag(ctx, in.Model),
		func(d *operator.Database) (err error) {
			queue, err = d.RegisterModel(ctx, in.Model, config, in.Body.by(ctx))
			return err
		})
	return answered(registered{queue}, err)
}

// checkModel refuses what nodes could not read, before it is stored: a secret written out would stand in the
// audit for ever.
func (a *API) checkModel(name string, config, override []byte) error {
	if _, err := a.cfg.ReadModel(name, config, override); err != nil {
		return fmt.Errorf("%w: %w", errInvalid, err)
	}
	return nil
}

type modelOverride struct {
	InModel
	Conditional
	Body struct {
		ReasonBody
		Override map[string]any `json:"override"`
	}
}

func (a *API) overrideModel(ctx context.Context, in *modelOverride) error {
	override, err := json.Marshal(in.Body.Override)
	if err != nil {
		return err
	}
	found, err := a.operator.Model(ctx, in.Model)
	if err != nil {
		return err
	}
	if err := a.checkModel(in.Model, found.Config, override); err != nil {
		return err
	}
	return a.override(ctx, in.Conditional, in.Model, override, in.Body.ReasonBody)
}

func (a *API) override(ctx context.Context, c Conditional, name string, override []byte, b ReasonBody) error {
	return a.alter(ctx, c, ofModel, name, modelTag(ctx, name), func(d *operator.Database) error {
		return d.OverrideModel(ctx, name, override, b.by(ctx))
	})
}

type modelFilter struct {
	Paging
	Model string `query:"model"`
}

func (a *API) listInstances(ctx context.Context, in *modelFilter) (*answer[list[operator.Instance]], error) {
	return paged(in.Paging, func(after operator.InstanceKey, limit int) ([]operator.Instance, error) {
		return a.operator.Instances(ctx, in.Model, after, limit)
	}, func(i operator.Instance) operator.InstanceKey {
		return operator.InstanceKey{Model: i.Model, Server: i.Server}
	})
}

type instanceRegistration struct {
	InServer
	Body struct {
		ReasonBody
		Endpoint string            `json:"endpoint" doc:"An http or https address without user or password."`
		Slots    int32             `json:"slots" minimum:"0"`
		Labels   map[string]string `json:"labels,omitempty"`
	}
}

// checkEndpoint refuses an endpoint that no request can be made of. The database checks the rest.
func checkEndpoint(endpoint string) error {
	if u, err := url.Parse(endpoint); err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" {
		return nil
	}
	return flaw("endpoint", fmt.Errorf("%q is no http or https address: write one such as http://gpu-1:8000", endpoint))
}

func (a *API) registerInstance(ctx context.Context, in *instanceRegistration) error {
	if err := checkEndpoint(in.Body.Endpoint); err != nil {
		return err
	}
	labels, err := json.Marshal(in.Body.Labels)
	if err != nil {
		return err
	}
	if in.Body.Labels == nil {
		labels = nil
	}
	i := operator.Instance{
		Model: in.Model, Server: in.Server, Endpoint: in.Body.Endpoint, Slots: in.Body.Slots,
		Labels: labels,
	}
	return a.operator.RegisterInstance(ctx, i, in.Body.by(ctx))
}

type announcement struct {
	InServer
	Body struct {
		Endpoint   string            `json:"endpoint" doc:"An http or https address without user or password."`
		Slots      int32             `json:"slots" minimum:"1"`
		Labels     map[string]string `json:"labels,omitempty"`
		TTL        float64           `json:"ttl_seconds,omitempty" minimum:"1" maximum:"86400" default:"30"`
		Deployment string            `json:"deployment,omitempty" maxLength:"63" doc:"That started it."`
	}
}

type announced struct {
	Order string  `json:"order" enum:"serve,drain,stop" doc:"drain: no new calls; stop: none runs any more."`
	TTL   float64 `json:"ttl_seconds"`
}

func (a *API) announceInstance(ctx context.Context, in *announcement) (*answer[announced], error) {
	// The endpoint gets prompts, and the secret headers of the model: an admin who is limited may not name one.
	if c := callerOf(ctx); c.limited() && !slices.Contains(c.Scopes, string(announce)) {
		return nil, fmt.Errorf("%w: a limited token needs scope announce", errForbidden)
	}
	if err := checkEndpoint(in.Body.Endpoint); err != nil {
		return nil, err
	}
	labels, err := json.Marshal(in.Body.Labels)
	if err != nil {
		return nil, err
	}
	if in.Body.Labels == nil {
		labels = nil
	}
	instance := operator.Announcement{
		Model: in.Model, Server: in.Server, Endpoint: in.Body.Endpoint, Slots: in.Body.Slots, Labels: labels,
		TTL: time.Duration(in.Body.TTL * float64(time.Second)), Deployment: in.Body.Deployment,
	}
	if err := a.checkNeighbours(ctx, instance); err != nil {
		return nil, err
	}
	order, err := a.operator.Announce(ctx, instance, ReasonBody{}.by(ctx))
	return answered(announced{order, in.Body.TTL}, err)
}

// checkNeighbours keeps a limited token from the workers and devices of models beyond its limits: instances
// of a device group share their slots, and those at one address a worker. The first instance there stays.
func (a *API) checkNeighbours(ctx context.Context, instance operator.Announcement) error {
	c := callerOf(ctx)
	if !c.limited() {
		return nil
	}
	models, err := a.operator.Neighbours(ctx, instance)
	if err != nil {
		return err
	}
	for _, model := range models {
		err := a.allowed(ctx, ofModel, model, c)
		if errors.Is(err, errForbidden) {
			return fmt.Errorf("%w: endpoint or labels.device_group: a model beyond the limits of the token has an "+
				"instance at this host and port, or in this device group", errForbidden)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
