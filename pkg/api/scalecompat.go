package api

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// scaleCompatRoutes are addresses under which the schedulers of others are called by hand: scripts go on working. What
// they set is an override, which ends by itself; /v1/scale is the whole.
func (a *API) scaleCompatRoutes() {
	for method, id := range map[string]string{"GET": "compat-scale-by-get", "POST": "compat-scale-model"} {
		add(a, route{
			method: method, path: "/models/scale", id: id,
			summary: "Add a number of instances to the desired ones of a model, for a time",
			scope:   operate, of: ofPlatform, changes: true,
		}, a.compatScale)
	}
	add(a, route{
		method: "POST", path: "/models/schedule", id: "compat-schedule-model",
		summary: "Wait for the next decision about a model, and return it",
		scope:   operate, of: ofPlatform, timeout: scheduleWait + 5*time.Second,
	}, a.compatSchedule)
	add(a, route{
		method: "POST", path: "/models/schedule_externally", id: "compat-schedule-model-externally",
		summary: "Set the instances of the deployment of a model behind its first one, for a time",
		scope:   operate, of: ofPlatform,
	}, a.compatScheduleExternally)
	add(a, route{
		method: "POST", path: "/models/schedule_externally_on_specific_provider",
		id:      "compat-schedule-model-on-provider",
		summary: "Set the instances of one deployment of a model, for a time",
		scope:   operate, of: ofPlatform,
	}, a.compatScheduleExternally)
	change(a, route{
		method: "POST", path: "/models/remove", id: "compat-remove-instance",
		summary: "Drain an instance of a model: its requests end, and it gets no new ones",
		scope:   operate, of: ofPlatform,
	}, a.compatRemove)
	add(a, route{
		method: "GET", path: "/models/status", id: "compat-model-status",
		summary: "The deployments of a model, in the order in which they are filled, and the last decision",
		scope:   read, of: ofPlatform,
	}, a.compatStatus)
}

// Times for which overrides of these addresses hold where the caller names none.
const (
	scaleFor    = time.Hour
	externalFor = 30 * 24 * time.Hour
)

// scheduleWait is how long a decision may take to come: states are stored every five seconds at least.
const scheduleWait = 15 * time.Second

// CompatReason is a reason that callers of these addresses need not give.
type CompatReason struct {
	Reason string `json:"reason,omitempty" query:"reason" maxLength:"1000" doc:"Why; it goes into the audit."`
}

func (w CompatReason) by(ctx context.Context) invalidation.By {
	return ReasonBody{Reason: cmp.Or(w.Reason, "by an address of compatibility")}.by(ctx)
}

type compatAmount struct {
	CompatReason

	Model  string `query:"model" required:"true" minLength:"1" maxLength:"200"`
	Amount int    `query:"amount" default:"1" minimum:"1" maximum:"1400" doc:"Instances to add to the desired number."`
	Until  Moment `query:"until" doc:"When it ends: a time, or a duration from now; an hour if empty."`
}

// overrideSet is an override as it was set.
type overrideSet struct {
	Model      string    `json:"model"`
	Deployment string    `json:"deployment"`
	Before     int       `json:"before" doc:"Desired instances before."`
	Instances  int       `json:"instances"`
	Until      time.Time `json:"until"`
}

func (a *API) compatScale(ctx context.Context, in *compatAmount) (*answer[overrideSet], error) {
	until, err := a.untilOr(ctx, in.Until, scaleFor)
	if err != nil {
		return nil, err
	}
	var set overrideSet
	// The number is read under the lock: of two additions at once the second one begins where the first ends.
	change := func(d *operator.Database, _ bool) error {
		all, err := deploymentsOf(ctx, d, in.Model)
		if err != nil {
			return err
		}
		set, err = overrideFor(ctx, d, all[0], min(desiredOf(all[0])+in.Amount, 1400), until, in.by(ctx))
		return err
	}
	if err := a.operator.Locked(ctx, operator.ObjectModelDeployments, in.Model, change); err != nil {
		return nil, err
	}
	return answered(set, nil)
}

// untilOr is a moment that was given, or the end of a time from now.
func (a *API) untilOr(ctx context.Context, given Moment, otherwise time.Duration) (time.Time, error) {
	if given.IsZero() {
		given.In = otherwise
	}
	return a.operator.At(ctx, given.Moment)
}

// desiredOf is how many instances a deployment is to have now.
func desiredOf(d operator.Deployment) int {
	switch {
	case d.Overridden:
		return int(*d.Override)
	case d.Orders != nil:
		return d.Orders.Desired
	case d.Decides && d.State != nil:
		return d.State.Desired
	}
	return d.Instances - d.Draining
}

func overrideFor(
	ctx context.Context, db *operator.Database, d operator.Deployment, instances int, until time.Time,
	by invalidation.By,
) (overrideSet, error) {
	err := db.SetScaleOverride(ctx, d.Name, &instances, until, by)
	return overrideSet{d.Model, d.Name, desiredOf(d), instances, until}, err
}

// deploymentsOf are the deployments of a model, at least one.
func deploymentsOf(ctx context.Context, db *operator.Database, model string) ([]operator.Deployment, error) {
	all, err := db.DeploymentsOf(ctx, model)
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("deployment of model %q: %w", model, invalidation.ErrNotFound)
	}
	return all, err
}

type compatModel struct {
	Body struct {
		CompatReason
		Model string `json:"model" minLength:"1" maxLength:"200"`
	}
}

// modelScaling is a model as its deployments and decisions have it.
type modelScaling struct {
	Model       string                `json:"model"`
	State       *operator.ScaleState  `json:"state,omitempty" doc:"Absent before the first decision."`
	Deployments []operator.Deployment `json:"deployments" nullable:"false"`
}

func (a *API) scalingOf(ctx context.Context, model string) (modelScaling, error) {
	all, err := deploymentsOf(ctx, a.operator, model)
	if err != nil {
		return modelScaling{}, err
	}
	return modelScaling{Model: model, State: all[0].State, Deployments: all}, nil
}

// compatSchedule waits for a decision that began after the call: the elected leader makes one a second.
func (a *API) compatSchedule(ctx context.Context, in *compatModel) (*answer[modelScaling], error) {
	first, err := a.scalingOf(ctx, in.Body.Model)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(scheduleWait); time.Now().Before(deadline); {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
		now, err := a.scalingOf(ctx, in.Body.Model)
		if err != nil {
			return nil, err
		}
		if now.State != nil && (first.State == nil || now.State.DecidedAt.After(first.State.DecidedAt)) {
			return answered(now, nil)
		}
	}
	return nil, fmt.Errorf("%w: no decision about model %q came within %v: is a leader elected?",
		invalidation.ErrState, in.Body.Model, scheduleWait)
}

type compatExternal struct {
	Body struct {
		CompatReason
		Model    string `json:"model" minLength:"1" maxLength:"200"`
		Provider string `json:"provider,omitempty" maxLength:"63" doc:"The deployment, where there are several."`
		Replicas int    `json:"replicas" minimum:"0" maximum:"1400"`
		Until    Moment `json:"until,omitzero" doc:"When it ends: a time, or a duration from now; 30 days if absent."`
	}
}

func (a *API) compatScheduleExternally(ctx context.Context, in *compatExternal) (*answer[overrideSet], error) {
	b := in.Body
	all, err := deploymentsOf(ctx, a.operator, b.Model)
	if err != nil {
		return nil, err
	}
	chosen := -1
	for i, d := range all {
		switch {
		case b.Provider == d.Name, b.Provider == "" && i == 1:
			chosen = i
		case b.Provider == "" && i > 1:
			return nil, fmt.Errorf("%w: provider: model %q has several deployments behind its first one: name one",
				errInvalid, b.Model)
		}
	}
	if chosen < 0 {
		return nil, fmt.Errorf("external deployment %q of model %q: %w", b.Provider, b.Model, invalidation.ErrNotFound)
	}
	until, err := a.untilOr(ctx, b.Until, externalFor)
	if err != nil {
		return nil, err
	}
	set, err := overrideFor(ctx, a.operator, all[chosen], b.Replicas, until, b.by(ctx))
	if err != nil {
		return nil, err
	}
	return answered(set, nil)
}

type compatRemoval struct {
	Body struct {
		CompatReason
		Model  string `json:"model" minLength:"1" maxLength:"200"`
		Server string `json:"server" minLength:"1" maxLength:"200" doc:"The name of the instance."`
	}
}

func (a *API) compatRemove(ctx context.Context, in *compatRemoval) error {
	return a.operator.DrainInstance(ctx, in.Body.Model, in.Body.Server, in.Body.by(ctx))
}

func (a *API) compatStatus(ctx context.Context, in *struct {
	Model string `query:"model" required:"true" minLength:"1" maxLength:"200"`
},
) (*answer[modelScaling], error) {
	return answered(a.scalingOf(ctx, in.Model))
}
