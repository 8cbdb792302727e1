package api

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale/simulate"
)

type minutesOver struct {
	Model   string `query:"model" required:"true" minLength:"1" maxLength:"200"`
	Minutes int    `query:"minutes" minimum:"1" maximum:"43200" default:"60" doc:"How far back."`
	Limit   int    `query:"limit" minimum:"1" maximum:"1000" default:"1000" doc:"How many, at most."`
	Cursor  string `query:"cursor" maxLength:"2000" doc:"The next_cursor of the page before."`
}

func (a *API) listScaleMinutes(ctx context.Context, in *minutesOver) (*answer[list[operator.ScaleMinute]], error) {
	over := time.Duration(in.Minutes) * time.Minute
	return paged(Paging{in.Limit, in.Cursor}, func(after time.Time, limit int) ([]operator.ScaleMinute, error) {
		return a.operator.ScaleMinutes(ctx, in.Model, over, after, limit)
	}, func(m operator.ScaleMinute) time.Time { return m.Minute })
}

type whatIf struct {
	Body struct {
		Model   string         `json:"model" minLength:"1" maxLength:"200"`
		Policy  map[string]any `json:"policy" doc:"Its fields; absent ones have their defaults."`
		Minutes int            `json:"minutes,omitempty" minimum:"1" maximum:"1440" default:"60"`
		Cold    float64        `json:"cold_seconds,omitempty" minimum:"0" maximum:"3600"`
	}
}

type whatIfOutcome struct {
	Score         simulate.Score         `json:"score"`
	RecordedHours float64                `json:"recorded_gpu_hours" doc:"Of the ready instances that there were."`
	ColdSeconds   float64                `json:"cold_seconds"`
	Minutes       []simulate.ReplayPoint `json:"minutes" nullable:"false"`
}

func (a *API) simulateScalePolicy(ctx context.Context, in *whatIf) (*answer[whatIfOutcome], error) {
	b := in.Body
	policy, err := readPolicy(b.Policy)
	if err != nil {
		return nil, err
	}
	recorded, err := a.operator.ScaleMinutes(ctx, b.Model, time.Duration(b.Minutes)*time.Minute, time.Time{},
		operator.PageMax)
	if err != nil {
		return nil, err
	}
	minutes := make([]simulate.Minute, len(recorded))
	starts, cold := 0.0, 0.0
	for i, m := range recorded {
		minutes[i] = simulate.Minute{
			Minute: m.Minute, Arrived: m.Arrived + m.Refused, Calls: m.Calls, Busy: m.BusySeconds,
			Desired: int(m.Desired), Ready: int(m.Ready),
		}
		starts, cold = starts+float64(m.Starts), cold+m.ColdSeconds
	}
	switch {
	case b.Cold > 0:
		cold = b.Cold
	case starts > 0:
		cold /= starts
	default:
		cold = 60
	}
	leave, err := simulate.Enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	replay, err := simulate.Again(ctx, minutes, policy, time.Duration(cold*float64(time.Second)))
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errInvalid, err)
	}
	return answered(whatIfOutcome{replay.Score, replay.Recorded, cold, replay.Minutes}, nil)
}
