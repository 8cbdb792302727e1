package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Operations of OpenAI-compatible servers.
const (
	OperationChat        = "chat"
	OperationCompletions = "completions"
	OperationEmbeddings  = "embeddings"
	OperationImages      = "images"
	OperationResponses   = "responses"
	OperationRerank      = "rerank"
	OperationScore       = "score"
	OperationPooling     = "pooling"
	OperationClassify    = "classify"
)

var operationPaths = map[string]string{
	OperationChat:        "/v1/chat/completions",
	OperationCompletions: "/v1/completions",
	OperationEmbeddings:  "/v1/embeddings",
	OperationImages:      "/v1/images/generations",
	OperationResponses:   "/v1/responses",
	OperationRerank:      "/v1/rerank",
	OperationScore:       "/v1/score",
	OperationPooling:     "/pooling",
	OperationClassify:    "/classify",
}

// OperationPath returns the path of an operation at OpenAI-compatible servers, below the root of their API without /v1;
// empty: there is no such operation.
func OperationPath(operation string) string { return operationPaths[operation] }

// operationList names the operations in messages.
const operationList = "chat, completions, embeddings, images, responses, rerank, score, pooling or classify"

// generates reports whether an operation answers with choices, which can be streamed.
func generates(operation string) bool {
	return operation == OperationChat || operation == OperationCompletions
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
	r, operation, err := p.requestOf(call, finishBy)
	if err != nil {
		return BadPayload(err)
	}
	call.Operation = operation
	if operation != p.model.Operation { // it may be one that a closed connection does not stop, or the model's
		own := *p
		own.model = p.model.calledFor(operation)
		p = &own
	}
	return p.exchange(ctx, call, r, func(r reply) Outcome { return p.judge(r, call) })
}

// requestOf builds the request of an operation. The payload may name its own model, if the model allows it, its
// operation, in the member operation that no server is sent, and may ask for a stream; what it leaves
// open the model decides.
func (p *openAI) requestOf(call Call, finishBy time.Time) (r request, operation string, err error) {
	expanded, err := p.model.body(call, finishBy)
	if err != nil {
		return r, "", err
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(expanded, &fields) != nil || fields == nil {
		return r, "", errors.New("payload is not a JSON object")
	}
	operation = p.model.operationOf(call, fields)
	delete(fields, "operation")
	if operationPaths[operation] == "" {
		return r, "", errors.New("operation must be " + operationList)
	}
	if err := p.setModel(fields); err != nil {
		return r, "", err
	}
	if err := CheckBackground(operation, fields["background"]); err != nil {
		return r, "", err
	}
	if err := CheckChoices(p.model.Name, p.model.ChoicesMax, operation, fields); err != nil {
		return r, "", err
	}
	streaming, err := p.setStream(fields, operation)
	if err != nil {
		return r, "", err
	}
	choices := answers(operation, fields)
	if streaming && choices > choicesMax {
		return r, "", fieldError("stream", "is for up to %d choices in one answer: send false for more", choicesMax)
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return r, "", fmt.Errorf("build request: %w", err)
	}
	header := p.headers(call, finishBy)
	// vLLM logs it, and older versions take it as the id of the run: it must not be that of an attempt
	// which may still be there.
	header.Set("X-Request-Id", attemptID(call.RunRef))
	r = request{
		method: http.MethodPost, url: p.origin(p.root()) + operationPaths[operation], body: body, header: header,
		events: newAssembly(choices), // some servers stream unasked
	}
	if streaming {
		r.accept = acceptEvents
	}
	return r, operation, nil
}

// operationOf is the operation of a call: what its caller says, then what its payload says, then the model's.
func (m Model) operationOf(call Call, fields map[string]json.RawMessage) string {
	return cmp.Or(call.Operation, textOf(fields["operation"]), m.Operation)
}

// setStream asks for a stream where the model does, and for its token counts.
func (p *openAI) setStream(fields map[string]json.RawMessage, operation string) (streaming bool, err error) {
	if p.model.Stream && generates(operation) && fields["stream"] == nil {
		fields["stream"] = json.RawMessage("true")
	}
	streaming = string(fields["stream"]) == "true"
	switch {
	case streaming && !generates(operation):
		return false, fmt.Errorf("stream is for chat and completions, not for %s", operation)
	case streaming:
		fields["stream_options"] = withUsage(fields["stream_options"])
	}
	return streaming, nil
}

// CheckBackground refuses the value of the field background of a request that lets the server answer before the run has
// ended: its slot would be free meanwhile, and no call would fetch the answer. That field of other operations is of
// another meaning. The error is a *FieldError.
func CheckBackground(operation string, value json.RawMessage) error {
	if operation != OperationResponses || !isSet(value) || string(value) == "false" {
		return nil // a server may take any other value for true
	}
	return fieldError("background", "must be false: the answer is that of the whole run")
}

// root is the path below which the server's routes are: that of the endpoint, which may have been
// registered with /v1 or without it.
func (p *openAI) root() string {
	return strings.TrimSuffix(strings.TrimSuffix(p.base.EscapedPath(), "/"), "/v1")
}

// setModel fills in the model's name at the server. One that the payload chooses must be on the
// model's list: others may be dearer, or not be meant for every client that may push.
func (p *openAI) setModel(fields map[string]json.RawMessage) error {
	var chosen string
	if raw := fields["model"]; isSet(raw) && json.Unmarshal(raw, &chosen) != nil {
		return errors.New("model is not a text")
	}
	switch {
	case chosen == "" || chosen == p.model.Name:
		fields["model"] = quote(p.model.RemoteName)
	case chosen == p.model.RemoteName:
	case slices.Contains(p.model.RemoteNames, chosen) || slices.Contains(p.model.RemoteNames, "*"):
	default:
		return fmt.Errorf("model %q is not one that remote_names of model %s allows a payload to choose",
			Clip(chosen), p.model.Name)
	}
	return nil
}

// withUsage asks for the token counts at the end of a stream, unless the payload says otherwise.
func withUsage(options json.RawMessage) json.RawMessage {
	fields := map[string]json.RawMessage{}
	if isSet(options) && json.Unmarshal(options, &fields) != nil {
		return options // for the server to refuse
	}
	if fields["include_usage"] == nil {
		fields["include_usage"] = json.RawMessage("true")
	}
	all, err := json.Marshal(fields)
	if err != nil {
		return options
	}
	return all
}

// judge reads an answer that is not a stream.
func (p *openAI) judge(r reply, call Call) Outcome {
	switch {
	case r.status/100 != 2:
		return ClassifyAnswer(r.status, r.header, r.body, call.Payload)
	case !json.Valid(r.body):
		return failed(ClassTransient, "worker answered with something that is not JSON")
	case hasMember(r.body, "error") && !hasMember(r.body, "choices") && !hasMember(r.body, "data"):
		return errorAfterOK(r.body, call.Payload, false)
	}
	var answer struct {
		Usage   json.RawMessage `json:"usage"`
		Status  json.RawMessage `json:"status"`
		Choices []struct {
			FinishReason json.RawMessage `json:"finish_reason"`
		} `json:"choices"`
	}
	_ = json.Unmarshal(r.body, &answer) // an answer of another shape has none of them
	for _, c := range answer.Choices {
		if reason, aborted := abortReason(c.FinishReason); aborted {
			return abortedBy(reason)
		}
	}
	if generates(call.Operation) && answer.Choices == nil {
		o := errorAfterOK(r.body, call.Payload, true)
		o.Reason = Clip("worker answered without choices: " + o.Reason)
		return o
	}
	if call.Operation == OperationResponses {
		switch reason, aborted := abortReason(answer.Status); {
		case aborted:
			return abortedBy(reason)
		case reason == "queued" || reason == "in_progress": // in the background, which it was not asked for
			return unknown("worker answered with status " + reason + ": the run goes on behind its answer")
		}
	}
	o := done(r.body, r.status)
	o.Tokens = TokensOf(answer.Usage)
	return o
}

// TokensOf reads the usage object of an answer of an OpenAI-compatible server. Responses and images have other names
// for the counts than the other operations.
func TokensOf(usage json.RawMessage) Tokens {
	type details struct {
		Cached int64 `json:"cached_tokens"`
	}
	var u struct {
		Prompt        int64   `json:"prompt_tokens"`
		Completion    int64   `json:"completion_tokens"`
		Input         int64   `json:"input_tokens"`
		Output        int64   `json:"output_tokens"`
		PromptDetails details `json:"prompt_tokens_details"`
		InputDetails  details `json:"input_tokens_details"`
	}
	if isSet(usage) {
		_ = json.Unmarshal(usage, &u) // a member of another type is none; the others are read
	}
	t := Tokens{
		In: max(u.Prompt, u.Input, 0), Cached: max(u.PromptDetails.Cached, u.InputDetails.Cached, 0),
		Out: max(u.Completion, u.Output, 0),
	}
	return Tokens{In: min(t.In, TokensMax), Cached: min(t.Cached, TokensMax), Out: min(t.Out, TokensMax)}
}

// TokensMax bounds the tokens that a server may report for one call: sums of more would overflow.
const TokensMax = 1 << 32

func isEventStream(reply *http.Response) bool {
	kind, _, err := mime.ParseMediaType(reply.Header.Get("Content-Type"))
	return err == nil && kind == "text/event-stream"
}
