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
	"strconv"
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
	r, err := p.requestOf(call, finishBy)
	if err != nil {
		return BadPayload(err)
	}
	a := p.do(ctx, r.request)
	if a.err != nil {
		return p.broken(ctx, a, a.err)
	}
	if a.reply.StatusCode/100 == 2 && isEventStream(a.reply) {
		return p.consume(ctx, stop, a, call, r.choices)
	}
	return p.judged(ctx, a, func(r reply) Outcome { return p.judge(r, call) })
}

// generation is a request with what its answer is read by.
type generation struct {
	request
	choices int // asked for
}

// requestOf builds the request. The payload may name its own model, if the model allows it, and may
// ask for a stream; what it leaves open the model decides.
func (p *openAI) requestOf(call Call, finishBy time.Time) (generation, error) {
	operation := cmp.Or(call.Operation, p.model.Operation)
	path := operationPaths[operation]
	if path == "" {
		return generation{}, errors.New("operation must be chat, completions, embeddings or images")
	}
	if strings.HasSuffix(strings.TrimSuffix(p.base.Path, "/"), "/v1") {
		path = strings.TrimPrefix(path, "/v1") // the endpoint was registered with it
	}
	expanded, err := p.body(call, finishBy)
	if err != nil {
		return generation{}, err
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(expanded, &fields) != nil || fields == nil {
		return generation{}, errors.New("payload is not a JSON object")
	}
	if err := p.setModel(fields); err != nil {
		return generation{}, err
	}
	generates := operation == OperationChat || operation == OperationCompletions
	if p.model.Stream && generates && fields["stream"] == nil {
		fields["stream"] = json.RawMessage("true")
	}
	g := generation{choices: 1}
	_ = json.Unmarshal(fields["n"], &g.choices) // absent, or for the server to refuse
	streaming := generates && string(fields["stream"]) == "true"
	if streaming {
		fields["stream_options"] = withUsage(fields["stream_options"])
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return generation{}, fmt.Errorf("build request: %w", err)
	}
	header := p.headers(call, finishBy)
	// vLLM logs it, and older versions take it as the id of the run: it must not be that of an attempt
	// which may still be there.
	header.Set("X-Request-Id", attemptID(call.Run))
	g.request = request{method: http.MethodPost, url: p.at(path), body: body, header: header}
	if streaming {
		g.accept = "text/event-stream, application/json"
	}
	return g, nil
}

// setModel fills in the model's name at the server. One that the payload chooses must be on the
// model's list: others may be dearer, or not be meant for whoever may push.
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
		return classifyStatus(r.status, r.header, r.body, call.Payload)
	case !json.Valid(r.body):
		return failed(ClassTransient, "worker answered with something that is not JSON")
	case hasMember(r.body, "error") && !hasMember(r.body, "choices") && !hasMember(r.body, "data"):
		return errorAfterOK(r.body, call.Payload, false)
	}
	var answer struct {
		Usage   json.RawMessage `json:"usage"`
		Choices []struct {
			FinishReason json.RawMessage `json:"finish_reason"`
		} `json:"choices"`
	}
	_ = json.Unmarshal(r.body, &answer) // an answer of another shape has neither
	for _, c := range answer.Choices {
		if reason, aborted := abortReason(c.FinishReason); aborted {
			return abortedBy(reason)
		}
	}
	o := done(r.body, r.status)
	o.Tokens = tokensOf(answer.Usage)
	return o
}

// tokensOf reads the usage object of an answer.
func tokensOf(usage json.RawMessage) Tokens {
	var u struct {
		Prompt     int64 `json:"prompt_tokens"`
		Completion int64 `json:"completion_tokens"`
		Input      int64 `json:"input_tokens"` // images
		Output     int64 `json:"output_tokens"`
		Details    struct {
			Cached int64 `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if !isSet(usage) || json.Unmarshal(usage, &u) != nil {
		return Tokens{}
	}
	return Tokens{
		In: max(u.Prompt, u.Input, 0), Cached: max(u.Details.Cached, 0), Out: max(u.Completion, u.Output, 0),
	}
}

func isEventStream(reply *http.Response) bool {
	kind, _, err := mime.ParseMediaType(reply.Header.Get("Content-Type"))
	return err == nil && kind == "text/event-stream"
}

// errorAfterOK classifies an error that came with status 200: servers that
// stream have promised success before they know. Once there was output the
// call has run, so that a lack of capacity is then a failure.
func errorAfterOK(body, request []byte, afterOutput bool) Outcome {
	status := errorCode(body)
	if status >= 400 && status < 600 && !afterOutput {
		return classifyStatus(status, http.Header{}, body, request)
	}
	text := errorText(body)
	class := classifyText(text, request).OrTransient()
	if class == ClassBusy {
		if !afterOutput {
			return Outcome{Kind: Busy, Class: ClassBusy, Reason: Clip(text)}
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
		return Health{State: StateUnhealthy, Reason: Clip(err.Error())}
	case status/100 != 2:
		return refusedProbe(status, body)
	}
	return p.withLoad(ctx, Health{State: StateReady})
}

// A batch of embeddings is one request with the inputs of all.

func (p *openAI) Measure(call Call, at time.Time) (Member, error) {
	fields, inputs, err := p.embedding(call)
	if err != nil {
		return Member{}, err
	}
	tokens := int64(0)
	for _, input := range inputs {
		tokens += int64(len(input)/bytesPerToken) + 1
	}
	delete(fields, "input")
	rest, err := json.Marshal(fields) // sorted by name: all but the inputs must be the same
	if err != nil {
		return Member{}, fmt.Errorf("measure call: %w", err)
	}
	return p.measure(call, at, string(rest), tokens), nil
}

func (p *openAI) embedding(call Call) (fields map[string]json.RawMessage, inputs []json.RawMessage, err error) {
	if operation := cmp.Or(call.Operation, p.model.Operation); operation != OperationEmbeddings {
		return nil, nil, fmt.Errorf("operation %s takes no batches", operation)
	}
	if json.Unmarshal(call.Payload, &fields) != nil || fields["input"] == nil {
		return nil, nil, errors.New("payload has no input")
	}
	var texts []string
	if json.Unmarshal(fields["input"], &texts) == nil {
		err = json.Unmarshal(fields["input"], &inputs)
		return fields, inputs, err
	}
	var text string
	if json.Unmarshal(fields["input"], &text) != nil {
		return nil, nil, errors.New("input must be a text or a list of texts to travel in a batch")
	}
	return fields, []json.RawMessage{fields["input"]}, nil
}

func (p *openAI) Join(calls []Call) (Call, error) {
	var body map[string]json.RawMessage
	var all []json.RawMessage
	for _, c := range calls {
		fields, inputs, err := p.embedding(c)
		if err != nil {
			return Call{}, fmt.Errorf("join entry %s: %w", c.Entry, err)
		}
		body, all = fields, append(all, inputs...)
	}
	list, err := json.Marshal(all)
	if err != nil {
		return Call{}, fmt.Errorf("join batch: %w", err)
	}
	body["input"] = list
	payload, err := json.Marshal(body)
	if err != nil {
		return Call{}, fmt.Errorf("join batch: %w", err)
	}
	return joined(calls, payload), nil
}

// Split renumbers the embeddings of each member from 0. The usage of the whole
// is not divided: nothing in the answer says whose tokens they were.
func (p *openAI) Split(calls []Call, whole Outcome) []Outcome {
	if whole.Kind != Done {
		return SameForAll(calls, whole)
	}
	var reply struct {
		Model json.RawMessage              `json:"model"`
		Data  []map[string]json.RawMessage `json:"data"`
	}
	byIndex := map[string]map[string]json.RawMessage{}
	if json.Unmarshal(whole.Result, &reply) == nil {
		for _, item := range reply.Data {
			byIndex[string(item["index"])] = item
		}
	}
	outcomes, next := make([]Outcome, len(calls)), 0
	for i, c := range calls {
		_, inputs, err := p.embedding(c)
		if err != nil {
			return misfit(calls, whole, err.Error())
		}
		data := make([]map[string]json.RawMessage, len(inputs))
		for j := range inputs {
			item := byIndex[strconv.Itoa(next)]
			if item == nil {
				return misfit(calls, whole, fmt.Sprintf("worker answered a batch without its embedding %d", next))
			}
			item["index"] = json.RawMessage(strconv.Itoa(j))
			data[j], next = item, next+1
		}
		result, err := json.Marshal(map[string]any{"object": "list", "model": reply.Model, "data": data})
		if err != nil {
			return misfit(calls, whole, err.Error())
		}
		outcomes[i] = Outcome{Kind: Done, Result: result, StatusCode: whole.StatusCode, SentAt: whole.SentAt}
	}
	if next != len(byIndex) {
		return misfit(calls, whole, fmt.Sprintf("worker answered %d inputs with %d embeddings", next, len(byIndex)))
	}
	return outcomes
}
