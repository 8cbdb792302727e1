package web

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// Chart is the points of a chart of time, as the browser draws it.
type Chart struct {
	// Unit is that of the values: "/s", "entries" or "s".
	Unit string `json:"unit"`
	// Stacked series are drawn one on another.
	Stacked bool `json:"stacked,omitempty"`
	// At are seconds since 1970.
	At     []int64  `json:"at"`
	Series []Series `json:"series"`
}

// Series is a line of a chart. A missing value is null.
type Series struct {
	Label  string `json:"label"`
	Colour string `json:"colour"` // name of a custom property of the style sheet, without dashes
	Dashed bool   `json:"dashed,omitempty"`
	// Stepped values hold until the next one.
	Stepped bool `json:"stepped,omitempty"`
	Bold    bool `json:"bold,omitempty"`
	// Right gives the series the axis on the right, and Unit its unit there.
	Right  bool       `json:"right,omitempty"`
	Unit   string     `json:"unit,omitempty"`
	Values []*float64 `json:"values"` // as many as Chart.At
}

// trend is the samples of one queue, or of several together, oldest first and of equal steps.
type trend struct {
	at        []time.Time
	in, out   []float64 // entries a second, NaN if not known
	initial   []float64
	waiting   []float64
	computing []float64
	failed    []int64
}

// trends are those of all queues.
type trends struct {
	of    map[string]trend
	total trend
	gone  int64 // entries that left the queues, also in the step that is not over
}

// trends returns the last minutes of all queues.
func (d *Dashboard) trends(ctx context.Context) (trends, error) {
	return cached(ctx, d, "trends", 5*time.Second, func(ctx context.Context) (trends, error) {
		points, err := d.db.Trends(ctx, trendOver, trendStep)
		if err != nil {
			return trends{}, err
		}
		return gather(points, time.Now().Add(-trendOver)), nil
	})
}

// gather arranges points by steps of time. Of the step that is not over yet it takes the count of
// entries alone: its means still change.
func gather(points []operator.TrendPoint, from time.Time) trends {
	first := from.Truncate(trendStep)
	n := int(trendOver / trendStep)
	all := trends{of: map[string]trend{}, total: newTrend(first, n)}
	for _, p := range points {
		i := int(p.At.Sub(first) / trendStep)
		if i < 0 {
			continue
		}
		all.gone += p.Gone
		if i >= n {
			continue
		}
		t, found := all.of[p.Queue]
		if !found {
			t = newTrend(first, n)
			all.of[p.Queue] = t
		}
		for _, t := range []trend{t, all.total} {
			t.in[i], t.out[i] = plus(t.in[i], p.InPerSecond), plus(t.out[i], p.OutPerSecond)
			t.initial[i] = plus(t.initial[i], &p.Initial)
			waiting := p.Pending - p.Computing
			t.waiting[i], t.computing[i] = plus(t.waiting[i], &waiting), plus(t.computing[i], &p.Computing)
			t.failed[i] = max(0, t.failed[i]) + p.Failed
		}
	}
	return all
}

func newTrend(first time.Time, n int) trend {
	t := trend{at: make([]time.Time, n), failed: make([]int64, n)}
	for _, values := range []*[]float64{&t.in, &t.out, &t.initial, &t.waiting, &t.computing} {
		*values = slices.Repeat([]float64{math.NaN()}, n)
	}
	for i := range n {
		t.at[i] = first.Add(time.Duration(i) * trendStep)
		t.failed[i] = -1
	}
	return t
}

func plus(a float64, b *float64) float64 {
	switch {
	case b == nil:
		return a
	case math.IsNaN(a):
		return *b
	}
	return a + *b
}

// failures returns how many entries of all queues failed. A step may have the samples of some queues alone.
func (t trends) failures() (n int64) {
	for _, of := range t.of {
		n += of.failures()
	}
	return n
}

// countedMax is up to how many failures of a queue a sample counts them, see penstock.count_queue. Beyond it has an
// estimate, which may grow by itself.
const countedMax = 10_000

// failures returns how many entries failed. Failures that were retried or discarded meanwhile may
// hide new ones.
func (t trend) failures() int64 {
	var n int64
	before := int64(-1)
	for _, failed := range t.failed {
		if failed < 0 {
			continue
		}
		if before >= 0 && failed <= countedMax {
			n += max(0, failed-before)
		}
		before = failed
	}
	return n
}

// known returns how long the samples go back.
func (t trend) known() time.Duration {
	for i, failed := range t.failed {
		if failed >= 0 {
			return t.at[len(t.at)-1].Sub(t.at[i]) + trendStep
		}
	}
	return 0
}

// chart returns the rates as a chart.
func (t trend) chart() Chart {
	c := Chart{Unit: "/s", Series: []Series{
		{Label: "in", Colour: "st-waiting", Values: nullable(t.in)},
		{Label: "out", Colour: "st-done", Dashed: true, Values: nullable(t.out)},
	}}
	for _, at := range t.at {
		c.At = append(c.At, at.Unix())
	}
	return c
}

// nullable returns values as JSON can have them: NaN as null, and rounded to what a chart can
// display.
func nullable(values []float64) []*float64 {
	found := make([]*float64, len(values))
	for i, v := range values {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			rounded := math.Round(v*1000) / 1000
			found[i] = &rounded
		}
	}
	return found
}
