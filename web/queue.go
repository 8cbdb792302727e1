package web

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/format"
	"github.com/penstock/penstock/web/picture"
)

const recentRuns = 2000 // runs from which times of a queue are taken

// queueView is the page of one queue.
type queueView struct {
	queueRow
	Over        string // length of the charts
	Spans       []string
	Waits       template.HTML
	WaitsData   template.HTML
	Runs        template.HTML
	RunsData    template.HTML
	Covered     *time.Time // since when the runs of these pictures are
	RunCount    int
	Flows       []operator.Usage
	Keys        []operator.Group
	Errors      []causeGroup
	Limits      []limitRow
	Settings    []fact
	History     []operator.Audit
	HistorySlow bool
	chart       Chart
}

// Title is that of the page.
func (v queueView) Title() string { return v.Name }

// Charts returns the series of the page.
func (v queueView) Charts() map[string]Chart { return map[string]Chart{"states": v.chart} }

var spans = []string{"15m", "1h", "6h", "24h"}

func (d *Dashboard) showQueue(ctx context.Context, q query) (any, error) {
	name := q.Get("name")
	queues, err := d.queues(ctx)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(queues, func(x operator.Queue) bool { return x.Name == name })
	if at < 0 {
		return nil, fmt.Errorf("queue %q: %w", name, invalidation.ErrQueueNotFound)
	}
	all, err := d.trends(ctx)
	if err != nil {
		return nil, err
	}
	v := queueView{queueRow: queueRows(queues[at:at+1], all)[0], Over: q.Typed("over"), Spans: spans}
	if !slices.Contains(spans, v.Over) {
		v.Over = "1h"
	}
	over, _ := time.ParseDuration(v.Over) // one of spans
	samples, err := cached(ctx, d, keyOf("samples", name, v.Over), 5*time.Second,
		func(ctx context.Context) ([]operator.Sample, error) { return d.db.Samples(ctx, name, over) })
	if err != nil {
		return nil, err
	}
	v.chart = statesChart(samples)
	settings, err := cached(ctx, d, keyOf("settings", name), 5*time.Second,
		func(ctx context.Context) (json.RawMessage, error) {
			settings, _, err := d.db.QueueSettings(ctx, name)
			return settings, err
		})
	if err != nil {
		return nil, err
	}
	v.Settings = settingsOf(settings)
	if err := d.queueRuns(ctx, &v); err != nil {
		return nil, err
	}
	if v.Errors, err = d.causeGroups(ctx, name); err != nil {
		return nil, err
	}
	v.Errors = v.Errors[:min(len(v.Errors), 5)]
	return v, d.queueTables(ctx, &v)
}

// queueRuns draws the times of the queue's recent runs.
func (d *Dashboard) queueRuns(ctx context.Context, v *queueView) error {
	runs, err := cached(ctx, d, keyOf("runs", v.Name), 5*time.Second,
		func(ctx context.Context) ([]operator.RecentRun, error) {
			return d.db.RecentRuns(ctx, v.Name, recentRuns)
		})
	if err != nil {
		return err
	}
	v.RunCount = len(runs)
	if len(runs) > 0 {
		v.Covered = &runs[0].FinishedAt
	}
	heat, histogram := heatOf(runs), histogramOf(runs)
	v.Waits, v.WaitsData = heat.HTML(), picture.Data(heat.Table())
	v.Runs, v.RunsData = histogram.HTML(), picture.Data(histogram.Table())
	return nil
}

// queueTables reads the lists of the page.
func (d *Dashboard) queueTables(ctx context.Context, v *queueView) error {
	usage, err := cached(ctx, d, keyOf("usage", v.Name), 3*time.Second,
		func(ctx context.Context) ([]operator.Usage, error) { return d.db.Usage(ctx, v.Name, "", "", 500) })
	if err != nil {
		return err
	}
	v.Flows = slices.Clone(usage)
	slices.SortStableFunc(v.Flows, func(a, b operator.Usage) int {
		return cmp.Or(cmp.Compare(b.Slots, a.Slots), cmp.Compare(b.Locks, a.Locks))
	})
	v.Flows = v.Flows[:min(len(v.Flows), 8)]
	keys, err := cached(ctx, d, keyOf("groups", v.Name), 5*time.Second,
		func(ctx context.Context) ([]operator.Group, error) { return d.db.Groups(ctx, v.Name, "", 20) })
	if err != nil {
		return err
	}
	v.Keys = slices.Clone(keys)
	slices.SortStableFunc(v.Keys, func(a, b operator.Group) int { return cmp.Compare(b.Entries, a.Entries) })
	v.Keys = v.Keys[:min(len(v.Keys), 8)]
	limits, err := d.limits(ctx)
	if err != nil {
		return err
	}
	for _, l := range limits {
		if slices.Contains(l.Queues, v.Name) {
			v.Limits = append(v.Limits, l)
		}
		if l.Name == ownLimit(v.Name) {
			v.InUse = &l.InUse
		}
	}
	// The audit has no index by object: a long one may take longer than a page has.
	v.History, err = cached(ctx, d, keyOf("audit of queue", v.Name), 30*time.Second,
		func(ctx context.Context) ([]operator.Audit, error) {
			return d.db.Audits(ctx, operator.AuditFilter{Object: v.Name, Limit: 10})
		})
	if err != nil && slow(err) {
		v.HistorySlow, err = true, nil
	}
	return err
}

// statesChart is the entries of a queue by state.
func statesChart(samples []operator.Sample) Chart {
	c := Chart{Unit: "entries", Stacked: true}
	thin := max(1, len(samples)/400)
	states := []Series{
		{Label: "computing", Colour: "st-computing"},
		{Label: "waiting", Colour: "st-waiting"},
		{Label: "initial", Colour: "st-initial"},
		{Label: "disabled", Colour: "st-disabled"},
	}
	for i, s := range samples {
		if i%thin != 0 {
			continue
		}
		c.At = append(c.At, s.At.Unix())
		for j, n := range []int64{s.Computing, s.Pending - s.Computing, s.Initial, s.Disabled} {
			v := float64(n)
			states[j].Values = append(states[j].Values, &v)
		}
	}
	c.Series = states
	return c
}

// waitBounds are the rows of the heat map, in seconds.
var waitBounds = []float64{0.01, 0.1, 0.5, 1, 5, 30, 120, 600, 3600, math.Inf(1)}

const heatColumns = 40

// heatOf arranges waits by the time at which their runs ended. Runs are in the order of their ends.
func heatOf(runs []operator.RecentRun) picture.HeatMap {
	h := picture.HeatMap{Title: "from push to begin", Bounds: waitBounds}
	if len(runs) == 0 {
		return h
	}
	first, last := runs[0].FinishedAt, runs[len(runs)-1].FinishedAt
	step := max(time.Second, last.Sub(first)/heatColumns+1)
	for begin, i := first, 0; i < len(runs); begin = begin.Add(step) {
		column := picture.HeatColumn{
			At: begin, Counts: make([]int64, len(waitBounds)), P50: math.NaN(),
			P95: math.NaN(), P99: math.NaN(),
		}
		var waits []float64
		for ; i < len(runs) && runs[i].FinishedAt.Before(begin.Add(step)); i++ {
			wait := runs[i].WaitSeconds
			waits = append(waits, wait)
			row := slices.IndexFunc(waitBounds, func(bound float64) bool { return wait <= bound })
			column.Counts[row]++
		}
		slices.Sort(waits)
		column.P50, column.P95, column.P99 = percentile(waits, 0.50), percentile(waits,
			0.95), percentile(waits, 0.99)
		h.Cells = append(h.Cells, column)
	}
	return h
}

// percentile returns a percentile by the nearest rank of sorted values; NaN: there are none.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	rank := int(math.Ceil(p*float64(len(sorted)))) - 1
	return sorted[max(0, rank)]
}

// runBounds are the bars of the histogram, in seconds.
var runBounds = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, math.Inf(1)}

func histogramOf(runs []operator.RecentRun) picture.Histogram {
	h := picture.Histogram{Title: "run time", Bounds: runBounds, Counts: make([]int64, len(runBounds))}
	times := make([]float64, 0, len(runs))
	for _, r := range runs {
		times = append(times, r.RunSeconds)
		h.Counts[slices.IndexFunc(runBounds, func(bound float64) bool { return r.RunSeconds <= bound })]++
	}
	slices.Sort(times)
	if len(times) > 0 {
		h.Markers = []picture.Marker{
			{Name: "p50", Value: percentile(times, 0.5)}, {
				Name:  "p95",
				Value: percentile(times, 0.95),
			}, {Name: "p99", Value: percentile(times, 0.99)},
		}
	}
	return h
}

// settingsOf lists the settings of a queue by name.
func settingsOf(text json.RawMessage) []fact {
	var settings map[string]json.RawMessage
	if err := json.Unmarshal(text, &settings); err != nil {
		return nil // there are none
	}
	var facts []fact
	for name, value := range settings {
		written := strings.Trim(string(value), `"`)
		if written == "null" || written == "{}" {
			continue
		}
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
			written = format.Count(n)
		}
		var hours, minutes, seconds float64
		if n, err := fmt.Sscanf(written, "%f:%f:%f", &hours, &minutes, &seconds); n == 3 && err == nil {
			written = format.Seconds(hours*3600 + minutes*60 + seconds) // an interval below a day
		}
		facts = append(facts, fact{strings.ReplaceAll(name, "_", " "), format.Label(written, 300)})
	}
	slices.SortFunc(facts, func(a, b fact) int { return strings.Compare(a.Label, b.Label) })
	return facts
}
