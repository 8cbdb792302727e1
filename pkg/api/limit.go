package api

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

type InLimit struct {
	Limit string `path:"limit" maxLength:"200"`
}

func (a *API) limitRoutes() {
	const one = "/v1/limits/{limit}"
	add(a, route{
		method: "GET", path: "/v1/limits", id: "list-limits", summary: "Limits by name, with their use",
		scope: read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.Limit]], error) {
		return paged(*in, func(after string, limit int) ([]operator.Limit, error) {
			return a.operator.Limits(ctx, after, limit)
		}, func(l operator.Limit) string { return l.Name })
	})
	add(a, route{
		method: "GET", path: one, id: "show-limit", summary: "One limit",
		scope: read, of: ofPlatform,
	}, func(ctx context.Context, in *InLimit) (*tagged[operator.Limit], error) {
		found, err := a.operator.Limit(ctx, in.Limit)
		return &tagged[operator.Limit]{limitTag(found), found}, err
	})
	change(a, route{
		method: "PUT", path: one, id: "set-limit", summary: "Create a limit, or change the given settings",
		scope: admin, of: ofPlatform,
	}, a.setLimit)
	change(a, route{
		method: "PUT", path: "/v1/queues/{queue}/limits/{limit}", id: "use-limit",
		summary: "Put a queue under a limit, or take it out",
		scope:   admin, of: ofPlatform,
	}, a.useLimit)
	add(a, route{
		method: "GET", path: "/v1/applications", id: "list-applications",
		summary: "Applications by name: nodes, locks, quota",
		scope:   read,
	}, a.listApplications)
	change(a, route{
		method: "PUT", path: "/v1/applications/{application}/quota", id: "set-quota",
		summary: "Set the quota of an application over all its queues",
		scope:   admin, of: ofPlatform,
	}, a.setQuota)
	change(a, route{
		method: "DELETE", path: "/v1/applications/{application}/quota", id: "remove-quota",
		summary: "Remove the quota of an application",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		InApplication
		Conditional
		ReasonQuery
	},
	) error {
		return a.quota(ctx, in.Conditional, in.Application, nil, in.by(ctx))
	})
	add(a, route{
		method: "GET", path: "/v1/usage", id: "list-usage", summary: "Use of slots by flow, now and in the last hours",
		scope: read, of: ofQueue,
	}, a.listUsage)
	add(a, route{
		method: "GET", path: "/v1/usage/hours", id: "list-usage-hours",
		summary: "Calls, GPU time and tokens by hour, queue, model and flow", scope: read, of: ofQueue,
	}, a.listUsageHours)
	change(a, route{
		path: "/v1/flows/weight", id: "set-flow-weight",
		summary: "Set the weight of a flow: its share relative to the 1 of others",
		scope:   admin, of: ofQueue,
	}, func(ctx context.Context, in *struct {
		OfOneQueue
		Body struct {
			ReasonBody
			Flow   string  `json:"flow"`
			Weight float64 `json:"weight" minimum:"0" doc:"Beside the usual 1; 0 goes back to that."`
		}
	},
	) error {
		return a.operator.SetFlowWeight(ctx, in.Body.Flow, in.Queue, in.Body.Weight, in.Body.by(ctx))
	})
}

// limitTag is about what can be set, and not about what is in use.
func limitTag(l operator.Limit) string {
	text, _ := json.Marshal([]any{l.MaxUnits, l.Rate, l.Burst, l.PerFlow, l.PerKey})
	return etag(text)
}

type limitSetting struct {
	InLimit
	Conditional
	Body settingsBody
}

func (a *API) setLimit(ctx context.Context, in *limitSetting) error {
	return a.alterLimit(ctx, in.Conditional, in.Limit, func(d *operator.Database) error {
		return d.SetLimit(ctx, in.Limit, in.Body.Settings, in.Body.by(ctx))
	})
}

func (a *API) alterLimit(ctx context.Context, c Conditional, name string, do func(*operator.Database) error) error {
	return a.alter(ctx, c, operator.ObjectLimit, name,
		func(d *operator.Database) (string, error) {
			found, err := d.Limit(ctx, name)
			return limitTag(found), err
		}, do)
}

type limitUse struct {
	InQueue
	InLimit
	Body struct {
		ReasonBody
		Units int `json:"units" minimum:"0" maximum:"2147483647" doc:"For each lock; 0 takes the queue out."`
	}
}

func (a *API) useLimit(ctx context.Context, in *limitUse) error {
	return a.operator.UseLimit(ctx, in.Queue, in.Limit, in.Body.Units, in.Body.by(ctx))
}

type InApplication struct {
	Application string `path:"application" maxLength:"200"`
}

func (a *API) listApplications(ctx context.Context, in *Paging) (*answer[list[operator.Application]], error) {
	c := callerOf(ctx)
	return pagedAllowed(c, *in, func(after string, limit int) ([]operator.Application, error) {
		return a.operator.Applications(ctx, after, limit)
	}, func(x operator.Application) string { return x.Name },
		func(x operator.Application) bool { return c.allows("", x.Name) })
}

type quotaSetting struct {
	InApplication
	Conditional
	Body struct {
		ReasonBody
		MaxUnits *int    `json:"max_units,omitempty" minimum:"0" doc:"Locks at once."`
		Rate     float64 `json:"rate,omitempty" minimum:"0" doc:"Locks a second."`
		Burst    float64 `json:"burst,omitempty" minimum:"0" doc:"Locks; a second's worth if absent."`
	}
}

func (a *API) setQuota(ctx context.Context, in *quotaSetting) error {
	l := operator.Quota{MaxUnits: in.Body.MaxUnits, Rate: in.Body.Rate, Burst: in.Body.Burst}
	return a.quota(ctx, in.Conditional, in.Application, &l, in.Body.by(ctx))
}

// quota sets or removes the limit that an application's quota is.
func (a *API) quota(ctx context.Context, c Conditional, application string, l *operator.Quota,
	by invalidation.By,
) error {
	return a.alterLimit(ctx, c, "application:"+application, func(d *operator.Database) error {
		return d.SetQuota(ctx, application, l, by)
	})
}

type usageFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listUsage(ctx context.Context, in *usageFilter) (*answer[list[operator.Usage]], error) {
	return paged(in.Paging, func(after [2]string, limit int) ([]operator.Usage, error) {
		return a.operator.Usage(ctx, in.Queue, after[0], after[1], limit)
	}, func(u operator.Usage) [2]string { return [2]string{u.Queue, u.Flow} })
}

type usageHoursFilter struct {
	Paging
	OfOneQueue
	From        time.Time `query:"from" doc:"The first hour."`
	To          time.Time `query:"to" doc:"The hour behind the last one."`
	Application string    `query:"application"`
	Model       string    `query:"model"`
	Flow        string    `query:"flow"`
}

func (a *API) listUsageHours(ctx context.Context, in *usageHoursFilter) (*answer[list[operator.UsageHour]], error) {
	if !in.To.IsZero() && !in.To.After(in.From) {
		return nil, fmt.Errorf("%w: to is not later than from", errInvalid)
	}
	return paged(in.Paging, func(after operator.UsageKey, limit int) ([]operator.UsageHour, error) {
		return a.operator.UsageHours(ctx, operator.UsageFilter{
			From: in.From, To: in.To, Application: in.Application, Queue: in.Queue, Model: in.Model, Flow: in.Flow,
			After: after, Limit: limit,
		})
	}, func(u operator.UsageHour) operator.UsageKey {
		return operator.UsageKey{Hour: u.Hour, Queue: u.Queue, Model: u.Model, Flow: u.Flow}
	})
}
