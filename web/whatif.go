package web

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale"
	"github.com/penstock/penstock/pkg/scale/simulate"
)

const (
	whatIfKept = 5 * time.Minute
	playMax    = 10 * time.Second // for both policies, which take a second; readings have less
)

// whatIfForm is another policy, and how long a past it is played against.
type whatIfForm struct {
	Given     bool
	Over      string
	Spans     []string
	Algorithm string
	Min, Max  string
	Slots     string
	SLO, Hold string // seconds
	Cold      string // seconds that a start takes
	Problem   string
}

// whatIf is what two policies would have made of the recorded arrivals.
type whatIf struct {
	Since    time.Time
	Recorded float64 // instance-hours that there were
	Problem  string  // why nothing was played
	Rows     []whatIfRow
	chart    Chart
}

// whatIfRow is the outcome of a policy.
type whatIfRow struct {
	Name string
	simulate.Score
	Late float64 // share
}

// whatIfAlgorithms are the choices of the form.
var whatIfAlgorithms = []string{
	string(scale.Penstock), string(scale.HPA), string(scale.ReplicateV2), string(scale.Utilization),
}

// Algorithms returns the choices of the form.
func (whatIfForm) Algorithms() []string { return whatIfAlgorithms }

// readWhatIf reads the form from the address. Its fields begin with those of the present policy.
func readWhatIf(q query, of deploymentRow) whatIfForm {
	var present scale.Policy
	_ = json.Unmarshal(of.Policy, &present) // what does not read has the defaults
	present = present.WithDefaults()
	inSeconds := func(s scale.Seconds) string {
		return strconv.FormatFloat(time.Duration(s).Seconds(), 'f', -1, 64)
	}
	f := whatIfForm{
		Given: q.Typed("whatif") != "", Over: q.Typed("past"), Spans: []string{"1h", "3h"},
		Algorithm: q.Typed("algorithm"),
		Min:       q.Typed("min"), Max: q.Typed("max"), Slots: q.Typed("slots"),
		SLO: q.Typed("slo"), Hold: q.Typed("hold"), Cold: q.Typed("cold"),
	}
	for _, x := range []struct {
		field    *string
		fallback string
	}{
		{&f.Over, "1h"},
		{&f.Algorithm, string(present.Algorithm)},
		{&f.Min, strconv.Itoa(present.Min)},
		{&f.Max, strconv.Itoa(present.Max)},
		{&f.Slots, strconv.Itoa(present.Slots)},
		{&f.SLO, inSeconds(present.SLO)},
		{&f.Hold, inSeconds(present.Hold)},
		{&f.Cold, "60"},
	} {
		if *x.field == "" {
			*x.field = x.fallback
		}
	}
	return f
}

// policy lays the form over the present policy.
func (f whatIfForm) policy(present scale.Policy) (p scale.Policy, cold time.Duration, err error) {
	p = present
	p.Algorithm = scale.Method(f.Algorithm)
	for _, x := range []struct {
		name, text string
		most       float64
		set        func(float64)
	}{
		{"min", f.Min, 1400, func(v float64) { p.Min = int(v) }},
		{"max", f.Max, 1400, func(v float64) { p.Max = int(v) }},
		{"slots", f.Slots, 10_000, func(v float64) { p.Slots = int(v) }},
		{"slo", f.SLO, 86_400, func(v float64) { p.SLO = scale.Seconds(seconds(v)) }},
		{"hold", f.Hold, 86_400, func(v float64) { p.Hold = scale.Seconds(seconds(v)) }},
		{"cold", f.Cold, 7200, func(v float64) { cold = seconds(v) }},
	} {
		v, err := strconv.ParseFloat(x.text, 64)
		if err != nil || math.IsNaN(v) || v < 0 || v > x.most {
			return p, 0, fmt.Errorf("%s is %q: want 0 to %g: %w", x.name, x.text, x.most, invalidation.ErrInvalid)
		}
		x.set(v)
	}
	return p, cold, p.Check()
}

// whatIf plays the recorded minutes of a model against the present policy and the one of the form, by the
// same code that decides in the leader.
func (d *Dashboard) whatIf(ctx context.Context, of deploymentRow, asked whatIfForm) (*whatIf, error) {
	return cached(ctx, d, keyOf("what if", of.Name, string(of.Policy), asked), whatIfKept,
		func(ctx context.Context) (*whatIf, error) {
			over, err := time.ParseDuration(asked.Over)
			if err != nil || !slices.Contains(asked.Spans, asked.Over) {
				return &whatIf{Problem: "The time to play is 1h or 3h."}, nil
			}
			var present scale.Policy
			_ = json.Unmarshal(of.Policy, &present)
			other, cold, err := asked.policy(present)
			if err != nil {
				return &whatIf{Problem: sentence(err.Error())}, nil
			}
			found, err := d.db.ScaleMinutes(ctx, of.Model, over, time.Time{}, operator.PageMax)
			if err != nil {
				return nil, err
			}
			minutes := make([]simulate.Minute, len(found))
			for i, m := range found {
				minutes[i] = simulate.Minute{
					Minute: m.Minute, Arrived: m.Arrived + m.Refused, Calls: m.Calls, Busy: m.BusySeconds,
					Desired: int(m.Desired), Ready: int(m.Ready),
				}
			}
			leave, err := simulate.Enter(ctx)
			if err != nil {
				return nil, err
			}
			defer leave()
			playing, cancel := context.WithTimeout(context.WithoutCancel(ctx), playMax)
			defer cancel()
			result := &whatIf{}
			for _, x := range []struct {
				name   string
				policy scale.Policy
			}{{"present policy", present}, {"other policy", other}} {
				played, err := simulate.Again(playing, minutes, x.policy, cold)
				switch {
				case err != nil && playing.Err() != nil:
					return nil, fmt.Errorf("play a policy: %w", err)
				case err != nil:
					return &whatIf{Problem: sentence(err.Error())}, nil
				}
				result.add(x.name, played)
			}
			return result, nil
		})
}

// add takes the outcome of a policy.
func (w *whatIf) add(name string, played simulate.Replay) {
	w.Rows = append(w.Rows, whatIfRow{Name: name, Score: played.Score, Late: played.Score.Violations()})
	line := Series{Label: name, Colour: "accent", Stepped: true, Bold: true}
	first := len(w.chart.At) == 0
	if first {
		w.Since, w.Recorded = played.Minutes[0].Minute, played.Recorded
		line = Series{Label: name, Colour: "st-waiting", Stepped: true}
		recorded := Series{Label: "recorded", Colour: "ink-3", Dashed: true, Stepped: true}
		w.chart = Chart{Unit: "instances", Series: []Series{recorded}}
	}
	for _, m := range played.Minutes {
		desired, recorded := float64(m.Desired), float64(m.Recorded)
		line.Values = append(line.Values, &desired)
		if first {
			w.chart.At = append(w.chart.At, m.Minute.Unix())
			w.chart.Series[0].Values = append(w.chart.Series[0].Values, &recorded)
		}
	}
	w.chart.Series = append(w.chart.Series, line)
}
