package webhook

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// Format is the shape of the body that a receiver gets.
type Format string

// Formats of bodies. Both are signed alike.
const (
	FormatStandard Format = ""     // type, timestamp and data, as Standard Webhooks recommends
	FormatJob      Format = "job"  // job_id, status and result, as clients of a dispatcher expect
	FormatBare     Format = "bare" // the data alone, as clients of a platform expect that name no envelope
)

// envelope is the message to a receiver. All of it is under the signature: a receiver that compares
// issuer and audience with the expected ones cannot be given a message that was signed for another
// receiver, or by another installation.
type envelope struct {
	Type     string          `json:"type"`     // entry.done, entry.failed, entry.expired or entry.cancelled
	At       time.Time       `json:"-"`        // when the entry ended
	Issuer   string          `json:"issuer"`   // the installation that signs
	Audience string          `json:"audience"` // the address that the message is for, as its pusher wrote it
	Data     json.RawMessage `json:"data"`     // id, queue, outcome, and the result or error
}

// newBody writes the body that Standard Webhooks recommends.
func newBody(e envelope) ([]byte, error) {
	type fields envelope // without methods
	body, err := json.Marshal(struct {
		fields
		Timestamp string `json:"timestamp"`
	}{fields(e), e.timestamp()})
	if err != nil {
		return nil, fmt.Errorf("write webhook body %s: %w", e.Type, err)
	}
	return body, nil
}

func (e envelope) timestamp() string { return e.At.UTC().Format(time.RFC3339Nano) }

// jobStatus says in a dispatcher's words how an entry ended.
var jobStatus = map[string]string{
	"done": "completed", "failed": "failed", "expired": "expired",
	"cancelled": "cancelled",
}

// newJobBody writes the body that clients of a dispatcher expect.
func newJobBody(e envelope) ([]byte, error) {
	var data struct {
		ID      int64           `json:"id"`
		Queue   string          `json:"queue"`
		Outcome string          `json:"outcome"`
		Error   string          `json:"error"`
		Reason  string          `json:"reason"`
		Result  json.RawMessage `json:"result"`
		Omitted bool            `json:"result_omitted"`
		Context json.RawMessage `json:"context"`
	}
	if err := json.Unmarshal(e.Data, &data); err != nil {
		return nil, fmt.Errorf("read data of webhook %s: %w", e.Type, err)
	}
	status := jobStatus[data.Outcome]
	if status == "" {
		return nil, fmt.Errorf("write webhook body: a job has no outcome %q", data.Outcome)
	}
	if data.Outcome == "done" && data.Result == nil && !data.Omitted {
		data.Result = json.RawMessage("null")
	}
	problem := data.Error
	if problem == "" {
		problem = data.Reason
	}
	body, err := json.Marshal(struct {
		ID        string          `json:"job_id"`
		Status    string          `json:"status"`
		Result    json.RawMessage `json:"result,omitempty"`
		Omitted   bool            `json:"result_omitted,omitempty"`
		Error     string          `json:"error,omitempty"`
		Context   json.RawMessage `json:"context,omitempty"`
		Queue     string          `json:"queue"`
		Timestamp string          `json:"timestamp"`
		Issuer    string          `json:"issuer"`
		Audience  string          `json:"audience"`
	}{
		strconv.FormatInt(data.ID, 10), status, data.Result, data.Omitted, problem, data.Context, data.Queue,
		e.timestamp(), e.Issuer, e.Audience,
	})
	if err != nil {
		return nil, fmt.Errorf("write webhook body of job %d: %w", data.ID, err)
	}
	return body, nil
}
