package inference

import (
	"context"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"strings"
	"time"
)

// Operations of OpenAI-compatible servers.
const (
	OperationChat        = "chat"
	OperationCompletions = "completions"
	OperationEmbeddings  = "embeddings"
	OperationImages      = "images"
)

var operationPaths = map[string]string{
	OperationChat:        "/v1/chat/completions",
	OperationCompletions: "/v1/completions",
	OperationEmbeddings:  "/v1/embeddings",
	OperationImages:      "/v1/images/generations",
}

// openAI speaks to OpenAI-compatible servers. A call is one connection; closing
// it stops the run. None of them can be asked for a run again.
type openAI struct{ wire }

func (p *openAI) Submit(ctx context.Context, call Call) Outcome {
	ctx, cancel, finishBy := p.begin(ctx, call)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	path, body, streaming, err := p.requestOf(call, finishBy)
	if err != nil {
		return badPayload(err)
	}
	header := p.headers(call, finishBy)
	header.Set("X-Request-Id", call.Entry) // vLLM logs it, and takes it as the id
	r := request{method: http.MethodPost, url: p.at(path), body: body, header: header}
	if streaming {
		r.accept = "text/event-stream, application/json"
	}
	a := p.do(ctx, r)
	if a.err != nil {
		return p.broken(ctx, a, a.err)
	}
	if a.reply.StatusCode/100 == 2 && isEventStream(a.reply) {
		return p.consume(ctx, stop, a, call)
	}
	return p.judge(ctx, a)
}

// requestOf decides path and body. The payload may name its own model and may
// ask for a stream; what it leaves open the model decides.
func (p *openAI) requestOf(call Call, finishBy time.Time) (path string, body json.RawMessage, streaming bool, err error) {
	operation := p.model.Operation
	if call.Operation != "" {
		operation = call.Operation
	}
	path = operationPaths[operation]
	if path == "" {
		return "", nil, false, errors.New("operation must be chat, completions, embeddings or images")
	}
	if strings.HasSuffix(strings.TrimSuffix(p.base.Path, "/"), "/v1") {
		path = strings.TrimPrefix(path, "/v1") // the endpoint was registered with it
	}
	expanded, err := p.body(call, finishBy)
	if err != nil {
		return "", nil, false, err
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(expanded, &fields) != nil || fields == nil {
		return "", nil, false, errors.New("payload is not a JSON object")
	}
	if fields["model"] == nil {
		fields["model"] = quote(p.model.RemoteName)
	}
	generates := operation == OperationChat || operation == OperationCompletions
	if p.model.Stream && generates && fields["stream"] == nil {
		fields["stream"] = json.RawMessage("true")
	}
	body, err = json.Marshal(fields)
	return path, body, generates && string(fields["stream"]) == "true", err
}

// judge reads an answer that is not a stream.
func (p *openAI) judge(ctx context.Context, a answer) Outcome {
	body, err := p.read(a.reply)
	if err != nil {
		o := p.broken(ctx, a, err)
		o.StatusCode = a.reply.StatusCode
		return o
	}
	status := a.reply.StatusCode
	var o Outcome
	switch {
	case status/100 != 2:
		o = classifyStatus(status, a.reply.Header, body)
	case !json.Valid(body):
		o = failed(ClassTransient, "worker answered with something that is not JSON")
	case hasMember(body, "error") && !hasMember(body, "choices") && !hasMember(body, "data"):
		o = errorAfterOK(body, false)
	default:
		o = done(body, status)
	}
	o.SentAt = a.sentAt
	if o.StatusCode == 0 {
		o.StatusCode = status
	}
	return o
}

func isEventStream(reply *http.Response) bool {
	kind, _, err := mime.ParseMediaType(reply.Header.Get("Content-Type"))
	return err == nil && kind == "text/event-stream"
}

// errorAfterOK classifies an error that came with status 200: servers that
// stream have promised success before they know. Once there was output the
// call has run, so that a lack of capacity is then a failure.
func errorAfterOK(body []byte, afterOutput bool) Outcome {
	status := errorCode(body)
	if status >= 400 && status < 600 && !afterOutput {
		return classifyStatus(status, http.Header{}, body)
	}
	text := errorText(body)
	class := orTransient(classifyText(text))
	if class == ClassBusy {
		if !afterOutput {
			return Outcome{Kind: Busy, Class: ClassBusy, Reason: clip(text)}
		}
		class = ClassTransient
	}
	return failed(class, text)
}

// errorCode finds a numeric code beside or inside the error; 0 when there is none.
func errorCode(body []byte) int {
	for _, path := range []string{"error.code", "code", "error.status_code", "status"} {
		raw, ok := lookup(body, path)
		var code int
		if ok && json.Unmarshal(raw, &code) == nil {
			return code
		}
	}
	return 0
}

// Poll never knows: these servers have no asynchronous calls.
func (p *openAI) Poll(context.Context, Run) Outcome {
	return unknown("OpenAI-compatible servers cannot be asked for a run")
}

// Cancel of a call is the end of its connection, which ending Submit's context
// brings about; there is nothing to send.
func (p *openAI) Cancel(context.Context, Run) Cancellation {
	return Cancellation{Reason: "a call is cancelled by closing its connection"}
}

// Probe asks for health, and for the list of models where a server has no
// health route (Ollama).
func (p *openAI) Probe(ctx context.Context) Health {
	limit := p.model.Timeouts.Probe.Duration()
	status, _, body, err := p.ask(ctx, limit, request{method: http.MethodGet, url: p.atOrigin(p.model.HealthPath)})
	if err == nil && status == http.StatusNotFound {
		status, _, body, err = p.ask(ctx, limit, request{method: http.MethodGet, url: p.atOrigin("/v1/models")})
	}
	switch {
	case err != nil:
		return Health{State: StateUnhealthy, Reason: clip(err.Error())}
	case status/100 != 2:
		return refusedProbe(status, body)
	}
	return p.withLoad(ctx, Health{State: StateReady})
}
