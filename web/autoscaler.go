package web

import (
	"context"
	"encoding/json"
	"errors"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale/simulate"
	"github.com/penstock/penstock/web/picture"
)

const (
	deploymentsMax = 200
	decisionsMax   = 200 // on the lane
	decisionRows   = 20
)

// autoscalerView is the deployments, and one model with its decisions.
type autoscalerView struct {
	Deployments []deploymentRow
	Settings    []operator.ScaleSetting
	Off         bool // no model is scaled
	Capped      bool
	Model       string
	Chosen      *deploymentRow // that decides for Model
	Instances   int64          // of Model
	Usable      int64
	Lags        bool // fewer of them are usable than are wanted
	Over        string
	Spans       []string
	Lane        template.HTML
	LaneData    template.HTML
	Decisions   []operator.ScaleDecision // newest first
	WhatIf      *whatIf
	Asked       whatIfForm
	chart       Chart
}

// Charts returns the series of the page.
func (v autoscalerView) Charts() map[string]Chart {
	charts := map[string]Chart{"scale": v.chart}
	if v.WhatIf != nil {
		charts["whatif"] = v.WhatIf.chart
	}
	return charts
}

// deploymentRow is a deployment with what its list says about it.
type deploymentRow struct {
	operator.Deployment
	Wanted  int  // instances; of the model where the leader orders none of the deployment
	Drives  bool // the leader orders instances of it
	Lags    bool // fewer of its instances are ready than it orders
	Problem string
}

// scaleSpans are the lengths of the chart.
var scaleSpans = []string{"1h", "6h", "24h"}

func (d *Dashboard) autoscalerPages() {
	d.page(page{
		path: "autoscaler", nav: "Autoscaler", section: "Fleet", title: "Autoscaler",
		template: "autoscaler", live: true,
		read: d.autoscaler,
	})
	d.scaleVerbs()
}

func (d *Dashboard) deployments(ctx context.Context) ([]operator.Deployment, error) {
	return cached(ctx, d, "deployments", beat, func(ctx context.Context) ([]operator.Deployment, error) {
		return d.db.Deployments(ctx, "", deploymentsMax)
	})
}

func (d *Dashboard) autoscaler(ctx context.Context, q query) (any, error) {
	v := autoscalerView{Model: q.Get("model"), Over: q.Typed("over"), Spans: scaleSpans}
	if !slices.Contains(scaleSpans, v.Over) {
		v.Over = "1h"
	}
	if err := d.listDeployments(ctx, &v); err != nil {
		return nil, err
	}
	settings, err := cached(ctx, d, "scale settings", beat, d.db.ScaleSettings)
	if err != nil {
		return nil, err
	}
	v.Settings = settings
	v.Off = slices.ContainsFunc(settings, func(s operator.ScaleSetting) bool {
		return s.Name == "scale.off" && string(s.Value) == "true"
	})
	if v.Chosen == nil {
		return v, nil
	}
	if err := d.scaleHistory(ctx, &v); err != nil {
		return nil, err
	}
	v.Asked = readWhatIf(q, *v.Chosen)
	if v.Asked.Given {
		v.WhatIf, err = d.whatIf(ctx, *v.Chosen, v.Asked)
		switch {
		case errors.Is(err, simulate.ErrBusy):
			v.WhatIf = &whatIf{Problem: sentence(err.Error())}
		case err != nil:
			return nil, err
		}
	}
	return v, nil
}

// listDeployments reads the deployments and chooses the one that decides for the model of the page.
func (d *Dashboard) listDeployments(ctx context.Context, v *autoscalerView) error {
	found, err := d.deployments(ctx)
	if err != nil {
		return err
	}
	v.Capped = len(found) >= deploymentsMax
	for _, f := range found {
		row := deploymentRow{Deployment: f}
		if f.State != nil && f.Decides {
			row.Wanted = f.State.Desired
		}
		if f.Orders != nil {
			row.Drives = true
			row.Wanted = f.Orders.Desired
			if f.Orders.Error != nil {
				row.Problem = *f.Orders.Error
			}
		}
		row.Lags = row.Drives && row.Wanted > f.Ready
		v.Deployments = append(v.Deployments, row)
	}
	at := slices.IndexFunc(v.Deployments, func(r deploymentRow) bool {
		return r.Decides && (v.Model == "" || r.Model == v.Model)
	})
	if at < 0 {
		return nil
	}
	v.Chosen, v.Model = &v.Deployments[at], v.Deployments[at].Model
	models, err := d.modelList(ctx)
	if err != nil {
		return err
	}
	for _, m := range models {
		if m.Name == v.Model {
			v.Instances, v.Usable = m.Instances, m.Usable
		}
	}
	v.Lags = v.Chosen.State != nil && int64(v.Chosen.State.Desired) > v.Usable
	return nil
}

// scaleHistory reads the samples and the decisions of the chosen model.
func (d *Dashboard) scaleHistory(ctx context.Context, v *autoscalerView) error {
	over, _ := time.ParseDuration(v.Over) // one of scaleSpans
	minutes, err := d.scaleMinutes(ctx, v.Model, over)
	if err != nil {
		return err
	}
	v.chart = scaleChart(minutes, time.Now().Add(-over), over)
	decisions, err := cached(ctx, d, keyOf("scale decisions", v.Model), beat,
		func(ctx context.Context) ([]operator.ScaleDecision, error) {
			return d.db.ScaleDecisions(ctx, operator.ScaleDecisionFilter{Model: v.Model, Limit: decisionsMax})
		})
	if err != nil {
		return err
	}
	v.Decisions = decisions[:min(len(decisions), decisionRows)]
	lane := picture.EventLane{Title: "Decisions about " + v.Model, From: time.Now().Add(-over), To: time.Now()}
	for _, x := range slices.Backward(decisions) {
		if x.At.After(lane.From) {
			lane.Events = append(lane.Events, picture.LaneEvent{
				At: x.At.UTC(), Before: int(x.Before), After: int(x.Desired), Text: x.Why,
			})
		}
	}
	v.Lane, v.LaneData = lane.HTML(), picture.Data(lane.Table())
	return nil
}

// scaleMinutes returns what a model did in each minute of the period that ends now.
func (d *Dashboard) scaleMinutes(
	ctx context.Context, model string, over time.Duration,
) ([]operator.ScaleMinute, error) {
	return cached(ctx, d, keyOf("scale minutes", model, over), 5*time.Second,
		func(ctx context.Context) ([]operator.ScaleMinute, error) {
			return d.db.ScaleMinutes(ctx, model, over, time.Time{}, operator.PageMax)
		})
}

// scaleChart is the five lines of a model: the metric in requests on the right axis, and numbers of
// instances. Minutes in which no leader decided are gaps.
func scaleChart(minutes []operator.ScaleMinute, from time.Time, over time.Duration) Chart {
	first := from.Truncate(time.Minute)
	n := int(over/time.Minute) + 1
	c := Chart{Unit: "instances", At: make([]int64, n), Series: []Series{
		{Label: "metric", Colour: "ink-3", Dashed: true, Right: true, Unit: "requests"},
		{Label: "raw", Colour: "st-waiting", Stepped: true},
		{Label: "stabilised", Colour: "st-disabled", Stepped: true},
		{Label: "limited", Colour: "accent", Stepped: true, Bold: true},
		{Label: "ready", Colour: "st-done", Stepped: true},
	}}
	for i := range n {
		c.At[i] = first.Add(time.Duration(i) * time.Minute).Unix()
	}
	for i := range c.Series {
		c.Series[i].Values = make([]*float64, n)
	}
	for _, m := range minutes {
		at := int(m.Minute.Sub(first) / time.Minute)
		if at < 0 || at >= n {
			continue
		}
		for i, whole := range []int32{m.Metric, m.Raw, m.Stabilised, m.Desired, m.Ready} {
			value := float64(whole)
			c.Series[i].Values[at] = &value
		}
	}
	return c
}

// modelList returns the models, as the page of models reads them.
func (d *Dashboard) modelList(ctx context.Context) ([]operator.Model, error) {
	return cached(ctx, d, "models", beat, func(ctx context.Context) ([]operator.Model, error) {
		return d.db.Models(ctx, "", modelsMax)
	})
}

// policyFacts writes the settings of a policy that are not defaults.
func policyFacts(policy json.RawMessage) string {
	var parts []string
	for _, f := range settingsOf(policy) {
		parts = append(parts, f.Label+" "+f.Value)
	}
	if len(parts) == 0 {
		return "the defaults"
	}
	return strings.Join(parts, ", ")
}
