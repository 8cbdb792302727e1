package worker

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Operations of the Open Inference Protocol: tensors in and out, or Triton's generate extension, which
// takes and answers an object such as {"text_input": ...}.
const (
	OperationInfer    = "infer"
	OperationGenerate = "generate"
)

// oip speaks the Open Inference Protocol (KServe v2): one synchronous call,
// readiness told by status code alone, no way to cancel or to ask again.
type oip struct {
	wire
	synchronous
}

// synchronous is what adapters have in common whose protocol has one call, and nothing to ask or
// tell it by.
type synchronous struct{}

// Poll never knows.
func (synchronous) Poll(context.Context, RunRef) Outcome {
	return unknown("the protocol has no asynchronous calls: a run cannot be asked for")
}

// Cancel has nothing to send: ending Submit's context closes the connection, and that is all.
func (synchronous) Cancel(context.Context, RunRef) Cancellation {
	return Cancellation{Reason: "the protocol has no cancel; the connection was closed"}
}

func (p *oip) Submit(ctx context.Context, call Call) Outcome {
	if p.model.Operation == OperationGenerate {
		return p.generate(ctx, call)
	}
	return p.submit(ctx, call, func(finishBy time.Time) (request, error) {
		body, err := p.inferBody(call, finishBy)
		return request{method: http.MethodPost, url: p.at(p.modelPath() + "/infer"), body: body}, err
	}, func(r reply) Outcome {
		switch {
		case r.status/100 != 2:
			return ClassifyAnswer(r.status, r.header, r.body, call.Payload)
		case r.header.Get("Inference-Header-Content-Length") != "":
			return failed(ClassInput, "worker answered with tensors in binary form, which no JSON result can hold: "+
				"let it answer in JSON")
		case hasMember(r.body, "outputs"):
			return done(r.body, r.status)
		case hasMember(r.body, "error"):
			return errorAfterOK(r.body, call.Payload, false)
		}
		return failed(ClassTransient, "worker answered without outputs")
	})
}

// inferBody sets the request id to the entry's where the payload has none. The
// server echoes it; it is not an idempotency key.
func (p *oip) inferBody(call Call, finishBy time.Time) (json.RawMessage, error) {
	expanded, err := p.model.body(call, finishBy)
	if err != nil {
		return nil, err
	}
	if field := binaryField(expanded); field != "" {
		return nil, fieldError(field, "asks for tensors in binary form, which a JSON payload cannot carry: "+
			"give and ask for data")
	}
	var body map[string]json.RawMessage
	if json.Unmarshal(expanded, &body) != nil || body["inputs"] == nil {
		return nil, errors.New("payload has no inputs: the Open Inference Protocol wants {\"inputs\":[...]}")
	}
	body["id"] = requestID(body["id"], call)
	return json.Marshal(body)
}

// requestID is the id of a request: that of the payload, else the entry's.
func requestID(own json.RawMessage, call Call) json.RawMessage {
	if isSet(own) {
		return own
	}
	return quote(call.Entry)
}

func (p *oip) modelPath() string {
	path := "/v2/models/" + url.PathEscape(p.model.RemoteName)
	if p.model.Version != "" {
		path += "/versions/" + url.PathEscape(p.model.Version)
	}
	return path
}

// Probe asks for the model, then for the server. Servers send empty bodies, and
// 400 as well as 503 for not ready.
func (p *oip) Probe(ctx context.Context) Health {
	ready, err := p.ok(ctx, p.modelPath()+"/ready")
	if err == nil && ready == http.StatusNotFound { // a server without the route, or without the model
		ready, err = p.ok(ctx, "/v2/health/ready")
	}
	switch {
	case err != nil:
		return probeFailed(err)
	case ready/100 == 2:
		return p.withLoad(ctx, strings.TrimSuffix(p.base.EscapedPath(), "/"), Health{State: StateReady})
	}
	live, err := p.ok(ctx, "/v2/health/live")
	if err != nil {
		return probeFailed(err)
	}
	h := Health{
		State: StateUnhealthy, Reason: "server is not live",
		Unreached: ready == http.StatusGatewayTimeout || live == http.StatusGatewayTimeout,
	}
	if live/100 == 2 {
		h.State, h.Reason = StateStarting, "server is live, model is not ready"
	}
	return h
}

func (p *oip) ok(ctx context.Context, path string) (int, error) {
	status, _, _, err := p.ask(ctx, p.model.Timeouts.Probe.Duration(), request{method: http.MethodGet, url: p.at(path)})
	return status, err
}

func hasMember(body []byte, name string) bool {
	var object map[string]json.RawMessage
	return json.Unmarshal(body, &object) == nil && isSet(object[name])
}
