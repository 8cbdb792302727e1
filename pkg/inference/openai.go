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
type openAI struct {
	wire
	synchronous
}

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
	return p.judged(ctx, a, p.judge)
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
func (p *openAI) judge(r reply) Outcome {
	switch {
	case r.status/100 != 2:
		return classifyStatus(r.status, r.header, r.body)
	case !json.Valid(r.body):
		return failed(ClassTransient, "worker answered with something that is not JSON")
	case hasMember(r.body, "error") && !hasMember(r.body, "choices") && !hasMember(r.body, "data"):
		return errorAfterOK(r.body, false)
	}
	return done(r.body, r.status)
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
