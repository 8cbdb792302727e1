package web

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/format"
	"github.com/penstock/penstock/web/picture"
)

const (
	usageMax     = 1000
	sharesDrawn  = 24
	jainPoints   = 720             // an hour at one each five seconds
	usageFresh   = 5 * time.Second // nodes report usage about every second
	weightLeast  = 0.001           // bounds of the schema
	weightMax    = 1000
	halfLife     = 300.0 // seconds, of the usage that nodes report
	serviceOfOne = halfLife / math.Ln2
)

// fairnessView is the shares of flows within an application.
type fairnessView struct {
	Application  string
	Applications []string
	Shares       template.HTML
	SharesData   template.HTML
	Jain         template.HTML
	JainData     template.HTML
	Index        string // now; empty: nothing runs
	Flows        []flowRow
	Capped       bool
}

// flowRow is a flow of a queue with its share.
type flowRow struct {
	operator.Usage
	Wanted float64
	Got    float64
	Lag    float64 // service-seconds that it got less than wanted; negative: more
}

// Fair reports whether the flow got its share within a tenth.
func (r flowRow) Fair() bool { return r.Wanted == 0 || math.Abs(r.Got-r.Wanted) <= r.Wanted/10 }

func (d *Dashboard) fairnessPages() {
	history := &jainHistory{of: map[string][]picture.JainPoint{}}
	d.page(page{
		path: "fairness", nav: "Fairness", section: "Policy", title: "Fairness", template: "fairness", live: true,
		read: func(ctx context.Context, q query) (any, error) { return d.fairness(ctx, q, history) },
	})
	d.verb(verb{
		name: "set_flow_weight", title: "Set weight of a flow", role: administrator,
		objects: []string{"flow", "queue"}, optional: []string{"queue"},
		fields: []field{{
			Name: "weight", Label: "Weight", Kind: "number", Required: true, Value: "1",
			Hint: "relative to other flows, 0.001 to 1,000; 0 removes it, so that it is 1 again",
		}},
		effect: "Flows with work get service in proportion to their weights. Nodes apply it within one heartbeat; " +
			"without a queue it holds in all queues.",
		preview: d.weightPreview, do: d.setWeight,
	})
}

func weightOf(in form) (float64, error) {
	weight, err := in.Float("weight")
	if err != nil || weight != 0 && (weight < weightLeast || weight > weightMax) {
		return 0, fmt.Errorf("weight %q: want 0, or a number from 0.001 to 1000: %w", in.Get("weight"),
			invalidation.ErrInvalid)
	}
	return weight, nil
}

func (d *Dashboard) setWeight(ctx context.Context, in form, by invalidation.By) (string, error) {
	weight, err := weightOf(in)
	if err != nil {
		return "", err
	}
	err = d.change.SetFlowWeight(ctx, in.Get("flow"), in.Get("queue"), weight, by)
	return fmt.Sprintf("The weight of flow %q is set.", in.Get("flow")), err
}

// weightPreview tells the share of the flow now, and that with twice its weight as an example of
// the effect; with a weight
// in the address that of the latter.
func (d *Dashboard) weightPreview(ctx context.Context, in form) (preview, error) {
	usage, err := d.usage(ctx)
	if err != nil {
		return preview{}, err
	}
	flow, queue := in.Get("flow"), in.Get("queue")
	application, current := "", 1.0
	for _, u := range usage {
		if u.Flow == flow && (queue == "" || u.Queue == queue) {
			application, current = u.Application, u.Weight
		}
	}
	weight := current * 2
	if in.Get("weight") != "" {
		if weight, err = weightOf(in); err != nil {
			return preview{}, err
		}
	}
	rows, _ := sharesOf(usage, application, "", 0)
	changed, _ := sharesOf(usage, application, flow, weight)
	return preview{Facts: []fact{
		{"weight now", strconv.FormatFloat(current, 'g', 4, 64)},
		{"share now", format.Percent(wantedBy(rows, flow, queue))},
		{"share with weight " + strconv.FormatFloat(weight, 'g', 4, 64), format.Percent(wantedBy(changed, flow,
			queue))},
	}}, nil
}

func wantedBy(rows []flowRow, flow, queue string) float64 {
	sum := 0.0
	for _, r := range rows {
		if r.Flow == flow && (queue == "" || r.Queue == queue) {
			sum += r.Wanted
		}
	}
	return sum
}

func (d *Dashboard) usage(ctx context.Context) ([]operator.Usage, error) {
	return cached(ctx, d, "usage", usageFresh, func(ctx context.Context) ([]operator.Usage, error) {
		return d.db.Usage(ctx, "", "", "", usageMax)
	})
}

func (d *Dashboard) fairness(ctx context.Context, q query, history *jainHistory) (any, error) {
	usage, err := d.usage(ctx)
	if err != nil {
		return nil, err
	}
	v := fairnessView{Application: q.Get("application"), Capped: len(usage) >= usageMax}
	for _, u := range usage {
		if !slices.Contains(v.Applications, u.Application) {
			v.Applications = append(v.Applications, u.Application)
		}
	}
	slices.Sort(v.Applications)
	if v.Application == "" && len(v.Applications) > 0 {
		v.Application = v.Applications[0]
	}
	for _, application := range v.Applications {
		_, index := sharesOf(usage, application, "", 0)
		history.add(application, time.Now(), index)
	}
	rows, index := sharesOf(usage, v.Application, "", 0)
	v.Flows = rows
	if !math.IsNaN(index) {
		v.Index = strconv.FormatFloat(index, 'f', 3, 64)
	}
	drawn := picture.Shares{Title: "Share wanted and got"}
	for _, r := range rows[:min(len(rows), sharesDrawn)] {
		drawn.Flows = append(drawn.Flows, picture.Share{Flow: r.label(rows), Wanted: r.Wanted, Got: r.Got})
	}
	v.Shares, v.SharesData = drawn.HTML(), picture.Data(drawn.Table())
	line := picture.JainLine{Title: "Jain index of " + v.Application, Points: history.points(v.Application)}
	v.Jain, v.JainData = line.HTML(), picture.Data(line.Table())
	return v, nil
}

// label is the name of the flow in the picture: with its queue where several of the rows have the flow.
func (r flowRow) label(rows []flowRow) string {
	switch {
	case r.Flow == "":
		return "(none) in " + r.Queue
	case slices.ContainsFunc(rows, func(o flowRow) bool { return o.Flow == r.Flow && o.Queue != r.Queue }):
		return r.Flow + " in " + r.Queue
	}
	return r.Flow
}

// sharesOf returns the flows of an application with the share that their weights give them among flows with work or
// recent service, the largest first, and the Jain index of service for weight. If flow is given, its weight counts as
// weight.
func sharesOf(usage []operator.Usage, application, flow string, weight float64) (rows []flowRow, index float64) {
	weights, slots := 0.0, 0.0
	for _, u := range usage {
		if u.Application != application || (u.Locks == 0 && u.Slots < 0.001) {
			continue
		}
		if flow != "" && u.Flow == flow {
			u.Weight = cmp.Or(weight, 1)
		}
		rows = append(rows, flowRow{Usage: u})
		weights += u.Weight
		slots += u.Slots
	}
	x, xx := 0.0, 0.0
	for i := range rows {
		r := &rows[i]
		if weights > 0 {
			r.Wanted = r.Weight / weights
		}
		if slots > 0 {
			r.Got = r.Slots / slots
		}
		r.Lag = (r.Wanted*slots - r.Slots) * serviceOfOne
		perWeight := 0.0
		if r.Weight > 0 {
			perWeight = r.Slots / r.Weight
		}
		x += perWeight
		xx += perWeight * perWeight
	}
	slices.SortStableFunc(rows, func(a, b flowRow) int {
		return cmp.Or(-cmp.Compare(a.Got, b.Got), cmp.Compare(a.Flow, b.Flow), cmp.Compare(a.Queue, b.Queue))
	})
	if xx == 0 {
		return rows, math.NaN()
	}
	return rows, x * x / (float64(len(rows)) * xx)
}

// jainHistory keeps the indexes of the last hour by application. There are no samples of them in the database: a leader
// has those since one of its pages was first displayed.
type jainHistory struct {
	mu sync.Mutex
	of map[string][]picture.JainPoint
}

func (h *jainHistory) add(application string, at time.Time, index float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	points := h.of[application]
	if n := len(points); n > 0 && at.Sub(points[n-1].At) < usageFresh {
		return
	}
	points = append(points, picture.JainPoint{At: at, Index: index})
	h.of[application] = points[max(0, len(points)-jainPoints):]
}

func (h *jainHistory) points(application string) []picture.JainPoint {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.of[application])
}
