package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// cog speaks the Cog HTTP API. The entry id is the prediction id, so that a
// second submit of a run that is still in flight attaches to it instead of
// starting another. After it completed, Cog forgets the id and the same PUT
// would run it again: completion therefore comes from the held connection
// (sync) or from the callback (async), never from a PUT repeated as a poll.
type cog struct {
	wire
	slots int
}

// cogRequest is the body of PUT /predictions/{id}.
type cogRequest struct {
	ID      string          `json:"id"`
	Input   json.RawMessage `json:"input"`
	Context json.RawMessage `json:"context,omitempty"`
	Webhook string          `json:"webhook,omitempty"`
	Events  []string        `json:"webhook_events_filter,omitempty"`
}

// prediction is what Cog answers and posts to callbacks.
type prediction struct {
	ID      string          `json:"id"`
	Status  string          `json:"status"`
	Output  json.RawMessage `json:"output"`
	Error   json.RawMessage `json:"error"`
	Logs    string          `json:"logs"`
	Metrics json.RawMessage `json:"metrics"`
}

func (c *cog) Submit(ctx context.Context, call Call) Outcome {
	call.Request = call.Payload
	if c.model.Type == TypeAsync && call.Callback == "" {
		// The entry is not to blame: this node was given no address, as another one was.
		return Outcome{Kind: NotReady, Unsent: true, Err: ErrNoCallback, Reason: ErrNoCallback.Error()}
	}
	return c.submit(ctx, call, func(time.Time) (request, error) {
		body, err := c.predictionBody(call)
		r := request{method: http.MethodPut, url: c.at("/predictions/" + url.PathEscape(call.Entry)), body: body}
		if c.model.Type == TypeAsync {
			r.header = http.Header{"Prefer": {"respond-async"}} // exactly this: any other value is taken as sync
		}
		return r, err
	}, func(r reply) Outcome { return c.judgeSubmit(call, r.status, r.header, r.body) })
}

// ErrNoCallback says that a call was not sent because its run could not report.
var ErrNoCallback = errors.New("an asynchronous model of cog needs tasknode.inference.callback_url, to report to")

// predictionBody wraps the payload as input. A model with a body template gives
// input (and context) itself.
func (c *cog) predictionBody(call Call) (json.RawMessage, error) {
	expanded, err := c.model.body(call, call.FinishBy)
	if err != nil {
		return nil, err
	}
	request := cogRequest{ID: call.Entry, Input: expanded}
	if c.model.Body != nil {
		request.Input = nil
		if err := json.Unmarshal(expanded, &request); err != nil {
			return nil, fmt.Errorf("fill the body template: %w", err)
		}
		// Where a run reports is not for a payload to say, though the template may pass it on whole.
		request.ID, request.Webhook, request.Events = call.Entry, "", nil
	}
	if string(request.Input) == "null" || request.Input == nil {
		request.Input = json.RawMessage("{}")
	}
	if c.model.Type == TypeAsync {
		request.Webhook = call.Callback
		request.Events = []string{"completed"} // of the others nothing is used
	}
	return json.Marshal(request)
}

func (c *cog) judgeSubmit(call Call, status int, header http.Header, body []byte) Outcome {
	switch {
	case status == http.StatusConflict && strings.Contains(strings.ToLower(string(body)), "exist"):
		// The Go runtime says this of an id in flight; the Rust one answers 202.
		return Outcome{Kind: Accepted, Remote: call.Entry, StatusCode: status}
	case status == http.StatusConflict:
		return Outcome{
			Kind: Busy, Class: ClassBusy, StatusCode: status,
			RetryAfter: retryAfter(header), Reason: Clip(reasonOf(status, errorText(body))),
		}
	case status/100 != 2:
		return ClassifyAnswer(status, header, body, call.Payload)
	}
	var p prediction
	if json.Unmarshal(body, &p) != nil {
		return failed(ClassTransient, "worker answered with something that is not a prediction")
	}
	if p.ID != "" && p.ID != call.Entry {
		return unknown(fmt.Sprintf("worker answered for prediction %q", Clip(p.ID)))
	}
	// An async run whose answer has the id of the call is one that may report, whatever it says of its status.
	taken := status == http.StatusAccepted || c.model.Type == TypeAsync && p.ID != ""
	if !taken && !p.known() {
		o := errorAfterOK(body, call.Payload, true)
		o.Reason = Clip("worker answered with something that is not a prediction: " + o.Reason)
		return o
	}
	// It ran: for want of room Cog answers 409.
	o := p.outcome(call.RunRef, body).ofAccepted()
	o.StatusCode = status
	return o
}

// known reports whether the status is one that Cog has.
func (p prediction) known() bool {
	switch p.Status {
	case "starting", "processing", "succeeded", "failed", "canceled", "cancelled", "aborted":
		return true
	}
	return false
}

// outcome reads a prediction. raw is what its progress is judged by.
func (p prediction) outcome(run RunRef, raw []byte) Outcome {
	o := Outcome{Logs: p.Logs, Metrics: p.Metrics}
	switch p.Status {
	case "succeeded":
		o.Kind, o.Result = Done, p.Output
		if o.Result == nil {
			o.Result = json.RawMessage("null")
		}
	case "failed":
		text := textOf(p.Error)
		o.Kind, o.Class, o.Reason = Failed, classifyText(text, run.Request).OrTransient(), Clip(text)
		if o.Class == ClassBusy {
			o.Kind = Busy
		}
	case "canceled", "cancelled", "aborted":
		o.Kind, o.Reason = Cancelled, "worker reports the prediction as canceled"
	default: // starting, processing
		o.Kind, o.Remote, o.Progress = Accepted, run.Entry, fingerprint(raw)
		o.Starting = p.Status == "starting"
	}
	return o
}

// Poll cannot ask for the run itself: Cog has no such route. It asks whether
// the worker is running anything. Unknown means that it certainly is not, so
// that the callback is on its way or lost.
func (c *cog) Poll(ctx context.Context, run RunRef) Outcome {
	h := c.Probe(ctx)
	running := Outcome{Kind: Accepted, Remote: run.Remote}
	switch h.State {
	case StateBusy:
		return running
	case StateReady:
		if h.Idle(c.slots) {
			o := unknown("worker is idle and no callback has come")
			o.MaybeRunning = false
			return o
		}
		return running
	case StateStarting, StateDefunct:
		o := unknown("worker restarted or broke down during the run: " + h.Reason)
		o.MaybeRunning = false
		return o
	default:
		return Outcome{Kind: NotReady, Reason: h.Reason, MaybeRunning: true}
	}
}

// Cancel delivers the request. The run has stopped only when the callback says
// canceled. A 404 proves nothing: some versions answer it for runs in flight.
func (c *cog) Cancel(ctx context.Context, run RunRef) Cancellation {
	header := http.Header{}
	setRun(header, run)
	status, _, body, err := c.ask(ctx, c.model.Timeouts.Control.Duration(), request{
		method: http.MethodPost, url: c.at("/predictions/" + url.PathEscape(run.Remote) + "/cancel"),
		header: header, body: []byte("{}"),
	})
	switch {
	case err != nil:
		return Cancellation{NoAnswer: true, Reason: Clip("cancel: " + err.Error())}
	case status/100 != 2:
		return Cancellation{Reason: Clip(reasonOf(status, errorText(body)))}
	}
	return Cancellation{Delivered: true, Reason: "worker took the cancel; its callback confirms it"}
}

func (c *cog) Probe(ctx context.Context) Health {
	status, _, body, err := c.ask(ctx, c.model.Timeouts.Probe.Duration(), request{
		method: http.MethodGet, url: c.at(c.model.HealthPath),
	})
	if err != nil {
		return probeFailed(err)
	}
	if status/100 != 2 {
		return refusedProbe(status, body)
	}
	var reply struct {
		Status    string `json:"status"`
		UserError string `json:"user_healthcheck_error"`
	}
	if json.Unmarshal(body, &reply) != nil {
		return Health{State: StateUnhealthy, Reason: "health check answered with something that is not JSON"}
	}
	h := parseLoad(body, c.model.RemoteName)
	h.State = cogState(reply.Status)
	if !h.State.Serving() {
		h.Reason = Clip(strings.TrimSpace(reply.Status + " " + reply.UserError))
	}
	return h
}

func cogState(status string) HealthState {
	switch status {
	case "READY":
		return StateReady
	case "BUSY":
		return StateBusy
	case "STARTING", "UNKNOWN":
		return StateStarting
	case "SETUP_FAILED", "DEFUNCT":
		return StateDefunct
	default:
		return StateUnhealthy
	}
}
