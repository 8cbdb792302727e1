package worker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"
)

// generic speaks the generic worker protocol, which is also the project's
// own: POST the payload to the endpoint with X-Source: dispatcher, and be
// answered {"status":"success","result":...}, {"status":"processing","job_id":...}
// or 503. An accepted run is polled.
type generic struct{ wire }

// genericReply is an answer to a submit or a poll; the id is looked up by
// the model's id_field.
type genericReply struct {
	Status     string          `json:"status"`
	Result     json.RawMessage `json:"result"`
	Error      json.RawMessage `json:"error"`
	ErrorClass json.RawMessage `json:"error_class"` // optional: one of the error classes
}

func (d *generic) Submit(ctx context.Context, call Call) Outcome {
	call.Request = call.Payload
	return d.submit(ctx, call, func(finishBy time.Time) (request, error) {
		body, err := d.model.body(call, finishBy)
		header := http.Header{}
		SetSource(header)
		if call.Callback != "" {
			header.Set(headerCallback, call.Callback)
		}
		return request{method: http.MethodPost, url: d.base.String(), body: body, header: header}, err
	}, func(r reply) Outcome {
		if r.status/100 == 2 {
			return d.judge(r.status, r.body, call.RunRef, "")
		}
		return d.judgeRefusal(r.status, r.header, r.body, call.RunRef)
	})
}

func (d *generic) judgeRefusal(status int, header http.Header, body []byte, run RunRef) Outcome {
	var reply genericReply
	isReply := json.Unmarshal(body, &reply) == nil
	switch {
	case status == http.StatusConflict && strings.Contains(string(body), "stale token"):
		return Outcome{Kind: Busy, StatusCode: status, Reason: ErrStaleToken.Error(), Err: ErrStaleToken}
	case isReply && status >= 500 && status != http.StatusServiceUnavailable && isOneOf(reply.Status,
		d.model.Statuses.Failed):
		return d.failure(status, reply, run) // the run's own end, whatever the status that carries it
	}
	return ClassifyAnswer(status, header, body, run.Request)
}

func (d *generic) Poll(ctx context.Context, run RunRef) Outcome {
	if d.model.PollPath == "" {
		return unknown("model has no poll_endpoint_template, so the run cannot be followed")
	}
	header := http.Header{}
	SetSource(header)
	setRun(header, run)
	status, answered, reply, err := d.ask(ctx, d.model.Timeouts.Control.Duration(), request{
		method: http.MethodGet, url: d.origin(remotePath(d.model.PollPath, run.Remote)), header: header,
	})
	switch {
	case err != nil:
		return Outcome{Kind: NotReady, Reason: Clip("poll: " + err.Error()), Err: err, MaybeRunning: true}
	case status/100 == 2:
		return d.judge(status, reply, run, run.Remote)
	case status == http.StatusNotFound || status == http.StatusGone:
		o := unknown("worker does not know the run any more; it may have restarted")
		o.StatusCode, o.MaybeRunning = status, false
		return o
	default:
		// The run is not to blame for a poll that went wrong: ask again.
		return Outcome{
			Kind: NotReady, StatusCode: status, RetryAfter: retryAfter(answered), MaybeRunning: true,
			Reason: Clip(reasonOf(status, errorText(reply))),
		}
	}
}

// judge reads an answer of status 2xx. remote is empty for a submit.
func (d *generic) judge(status int, body []byte, run RunRef, remote string) Outcome {
	var reply genericReply
	if err := json.Unmarshal(body, &reply); err != nil {
		if remote != "" {
			return Outcome{
				Kind: NotReady, StatusCode: status, MaybeRunning: true,
				Reason: "worker answered a poll with something that is not JSON",
			}
		}
		if json.Valid(body) && d.model.Type == TypeSync {
			return done(body, status) // an answer without a status: a list, a bare value
		}
		return failed(ClassTransient, "worker answered with something that is not JSON")
	}
	switch {
	case reply.Status == "" && remote == "" && d.model.Type == TypeSync:
		return done(body, status)
	case reply.Status == "" && remote == "" && d.remoteID(body) == "":
		return failed(ClassTransient, "worker of an async model answered with neither a status nor a "+
			d.model.IDField+": if it answers with the result, model_type is sync")
	case isOneOf(reply.Status, d.model.Statuses.Success):
		if reply.Result == nil {
			return done(body, status)
		}
		return done(reply.Result, status)
	case isOneOf(reply.Status, d.model.Statuses.Failed) && remote != "":
		return d.failure(status, reply, run).ofAccepted()
	case isOneOf(reply.Status, d.model.Statuses.Failed):
		return d.failure(status, reply, run)
	case isOneOf(reply.Status, d.model.Statuses.Cancelled):
		return Outcome{Kind: Cancelled, StatusCode: status, Reason: "worker reports the run as cancelled"}
	}
	if remote == "" {
		remote = d.remoteID(body)
	}
	if !usableRemote(remote) {
		return unknown(fmt.Sprintf("worker accepted the call without a usable %s", d.model.IDField))
	}
	return Outcome{
		Kind: Accepted, StatusCode: status, Remote: remote, Progress: fingerprint(body),
		Starting: isOneOf(reply.Status, d.model.Statuses.Starting),
	}
}

// report reads what a worker posts to a callback address: what it would answer to a poll.
func (d *generic) report(run RunRef, body []byte) (Outcome, error) {
	var reply genericReply
	if err := json.Unmarshal(body, &reply); err != nil {
		return Outcome{}, fmt.Errorf("read report: %w", err)
	}
	if reply.Status == "" {
		return Outcome{}, errors.New("read report: it has no status")
	}
	if id := d.remoteID(body); id != "" && run.Remote != "" && id != run.Remote && id != run.Entry {
		return Outcome{}, fmt.Errorf("read report: it is about run %q, not %q", Clip(id), run.Remote)
	}
	return d.judge(http.StatusOK, body, run, cmp.Or(run.Remote, run.Entry)), nil
}

func (d *generic) failure(status int, reply genericReply, run RunRef) Outcome {
	text := textOf(reply.Error)
	if isOneOf(text, d.model.Statuses.Cancelled) { // to a protocol with two ends, a cancel is a failure
		return Outcome{Kind: Cancelled, StatusCode: status, Reason: "worker reports the run as cancelled"}
	}
	o := failed(namedClass(textOf(reply.ErrorClass), text, run.Request), text)
	o.StatusCode, o.Stated = status, true
	if o.Class == ClassBusy {
		o.Kind = Busy
	}
	return o
}

// remoteID reads the id field, a string or a number.
func (d *generic) remoteID(body []byte) string {
	raw, ok := lookup(body, d.model.IDField)
	if !ok {
		return ""
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var number json.Number
	if json.Unmarshal(raw, &number) == nil {
		return number.String()
	}
	return ""
}

func (d *generic) Cancel(ctx context.Context, run RunRef) Cancellation {
	if d.model.CancelPath == "" {
		return Cancellation{Reason: "model has no cancel_endpoint_template"}
	}
	header := http.Header{}
	SetSource(header)
	setRun(header, run)
	status, _, body, err := d.ask(ctx, d.model.Timeouts.Control.Duration(), request{
		method: http.MethodPost, url: d.origin(remotePath(d.model.CancelPath, run.Remote)),
		header: header, body: []byte("{}"),
	})
	if err != nil {
		return Cancellation{NoAnswer: true, Reason: Clip("cancel: " + err.Error())}
	}
	if status/100 != 2 {
		return Cancellation{Reason: Clip(reasonOf(status, errorText(body)))}
	}
	var reply struct {
		Status    string `json:"status"`
		Cancelled bool   `json:"cancelled"`
	}
	_ = json.Unmarshal(body, &reply) // an empty answer confirms nothing, which is what it leaves
	if reply.Cancelled || isOneOf(reply.Status, d.model.Statuses.Cancelled) {
		return Cancellation{Delivered: true, Confirmed: true}
	}
	return Cancellation{Delivered: true, Reason: "worker took the cancel without saying that the run stopped"}
}

// Probe asks beside the path that takes the calls, and at the origin if nothing is there.
func (d *generic) Probe(ctx context.Context) Health {
	root := strings.TrimSuffix(path.Dir("/"+strings.Trim(d.base.EscapedPath(), "/")), "/")
	status, body, err := d.askBelow(ctx, d.model.Timeouts.Probe.Duration(), root, d.model.HealthPath)
	if err != nil {
		return probeFailed(err)
	}
	if status/100 != 2 {
		return refusedProbe(status, body)
	}
	h := parseLoad(body, d.model.RemoteName)
	h.State = StateReady
	if h.Active != nil && h.Capacity != nil && *h.Active >= *h.Capacity {
		h.State = StateBusy
	}
	return h
}

// refusedProbe tells a worker that is still loading from one that is ill.
func refusedProbe(status int, body []byte) Health {
	text := strings.ToLower(errorText(body))
	h := Health{
		State: StateUnhealthy, Reason: Clip(reasonOf(status, text)), Unreached: status == http.StatusGatewayTimeout,
	}
	if saysStarting(text) {
		h.State = StateStarting
	}
	return h
}

func isOneOf(status string, words []string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.EqualFold(w, status) })
}

// fingerprint changes when the report does.
func fingerprint(report []byte) string {
	sum := sha256.Sum256(report)
	return base64.RawURLEncoding.EncodeToString(sum[:12])
}

// A batch of the generic protocol is {"items":[payload, ...]}, answered by
// {"status":"success","result":[{"status":...,"result"|"error":...}, ...]}, the
// results in the order of the items.

func (d *generic) Measure(call Call, at time.Time) (Member, error) {
	if !json.Valid(call.Payload) {
		return Member{}, errors.New("payload is not JSON")
	}
	return d.measure(call, at, "", int64(len(call.Payload)/bytesPerToken)), nil
}

// bytesPerToken is the usual rule of thumb for text, used where the model names
// no tokens_field.
const bytesPerToken = 4

func (d *generic) Join(calls []Call) (Call, error) {
	items := make([]json.RawMessage, 0, len(calls))
	for _, c := range calls {
		items = append(items, c.Payload)
	}
	payload, err := json.Marshal(map[string]any{"items": items})
	if err != nil {
		return Call{}, fmt.Errorf("join batch: %w", err)
	}
	return joined(calls, payload), nil
}

func (d *generic) Split(calls []Call, whole Outcome) []Outcome {
	if whole.Kind != Done {
		return SameForAll(calls, whole)
	}
	var items []json.RawMessage
	if json.Unmarshal(whole.Result, &items) != nil || len(items) != len(calls) {
		return misfit(calls, whole,
			fmt.Sprintf("worker answered a batch of %d with %d results", len(calls), len(items)))
	}
	outcomes := make([]Outcome, len(calls))
	for i, item := range items {
		run := calls[i].RunRef
		run.Request = calls[i].Payload
		o := d.judge(whole.StatusCode, item, run, "")
		if o.Kind == Accepted || o.Kind == Unknown {
			o = failed(ClassTransient, "worker left an item of the batch without a result")
		}
		o.SentAt = whole.SentAt
		outcomes[i] = o
	}
	return outcomes
}
