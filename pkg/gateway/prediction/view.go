package prediction

import (
	"encoding/json"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
)

// Statuses of predictions.
const (
	starting   = "starting"
	processing = "processing"
	succeeded  = "succeeded"
	failed     = "failed"
	canceled   = "canceled"
)

// view is a prediction as clients see it.
type view struct {
	ID          string          `json:"id"`
	Model       string          `json:"model"`
	Version     string          `json:"version"`
	Input       json.RawMessage `json:"input"`
	Output      json.RawMessage `json:"output"`
	Error       *string         `json:"error"`
	Logs        string          `json:"logs"`
	Status      string          `json:"status"`
	Source      string          `json:"source"`
	DataRemoved bool            `json:"data_removed"`
	CreatedAt   stamp           `json:"created_at"`
	StartedAt   *stamp          `json:"started_at"`
	CompletedAt *stamp          `json:"completed_at"`
	Deadline    *stamp          `json:"deadline,omitempty"`
	Metrics     metrics         `json:"metrics"`
	Webhook     *string         `json:"webhook,omitempty"`
	Events      []string        `json:"webhook_events_filter,omitempty"`
	URLs        urls            `json:"urls"`
}

type metrics struct {
	Predict *float64 `json:"predict_time,omitempty"` // seconds
	Total   *float64 `json:"total_time,omitempty"`
}

type urls struct {
	Get    string `json:"get"`
	Cancel string `json:"cancel"`
	Stream string `json:"stream,omitempty"`
}

// stamp is a time in UTC with milliseconds.
type stamp time.Time

// MarshalJSON implements json.Marshaler.
func (s stamp) MarshalJSON() ([]byte, error) {
	return []byte(time.Time(s).UTC().Format(`"2006-01-02T15:04:05.000Z"`)), nil
}

func stampOf(t *time.Time) *stamp {
	if t == nil {
		return nil
	}
	s := stamp(*t)
	return &s
}

// ended says whether the prediction has ended.
func (p row) ended() bool { return p.EndedAt != nil }

// view returns the prediction with addresses below base.
func (p row) view(base string) view {
	address := base + "/v1/predictions/" + p.ID
	v := view{
		ID: p.ID, Model: p.Model, Version: p.Version, Input: p.Input, Output: json.RawMessage("null"), Source: "api",
		CreatedAt: stamp(p.Created), StartedAt: stampOf(p.ClaimedAt), CompletedAt: stampOf(p.EndedAt),
		Deadline: stampOf(p.Deadline), Webhook: p.Webhook, Events: p.Events,
		URLs: urls{Get: address, Cancel: address + "/cancel"},
	}
	if p.StreamKey != nil {
		v.URLs.Stream = address + "/stream/" + *p.StreamKey
	}
	p.outcome(&v)
	if p.EndedAt != nil {
		total := p.EndedAt.Sub(p.Created).Seconds()
		v.Metrics.Total = &total
		if p.RanMS != nil {
			ran := time.Duration(*p.RanMS) * time.Millisecond
			seconds, began := ran.Seconds(), stamp(p.EndedAt.Add(-ran))
			v.Metrics.Predict, v.StartedAt = &seconds, &began
		}
	}
	return v
}

// outcome sets status, output and error. A prediction that expired is canceled: clients wait for ever for the end of
// one that is "aborted".
func (p row) outcome(v *view) {
	reason := p.Reason
	switch p.State {
	case "waiting":
		v.Status = starting
	case "running":
		v.Status = processing
	case "done":
		v.Status, v.Output, v.DataRemoved = succeeded, outputOf(p), gateway.KeptElsewhere(p.Result)
	case "failed":
		v.Status, v.Error = failed, &reason
	case "expired":
		reason = "the deadline was over before the prediction had ended"
		v.Status, v.Error = canceled, &reason
	default:
		v.Status = canceled
	}
}
