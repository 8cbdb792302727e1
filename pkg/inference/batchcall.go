package inference

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Batcher is an adapter whose protocol can carry several entries in one call:
// dispatcher, Open Inference Protocol, and OpenAI embeddings. Everything that
// belongs to an entry (result, error, retry, deadline) stays its own.
type Batcher interface {
	// Measure says with which others a call may travel, and what it weighs.
	Measure(call Call, at time.Time) (Member, error)

	// Join makes one call of several of the same shape.
	Join(calls []Call) (Call, error)

	// Split gives each of the joined calls its own outcome, in their order.
	Split(calls []Call, whole Outcome) []Outcome
}

// joined describes the batch as a whole. Its id depends on its members and
// their tokens, so that a repeated batch is the same to the worker and another
// composition is not. The latest deadline counts: no member is cut short by
// another, and the finish of one that is late is refused anyway.
func joined(calls []Call, payload json.RawMessage) Call {
	sum := sha256.New()
	whole := Call{Payload: payload, Operation: calls[0].Operation, TraceParent: calls[0].TraceParent, TraceState: calls[0].TraceState}
	endless := false
	for _, c := range calls {
		fmt.Fprintf(sum, "%d:%s:%d\n", len(c.Entry), c.Entry, c.Token)
		whole.Token, whole.Attempt = max(whole.Token, c.Token), max(whole.Attempt, c.Attempt)
		endless = endless || c.FinishBy.IsZero()
		if c.FinishBy.After(whole.FinishBy) {
			whole.FinishBy = c.FinishBy
		}
	}
	if endless {
		whole.FinishBy = time.Time{}
	}
	whole.Entry = "batch-" + hex.EncodeToString(sum.Sum(nil)[:16])
	return whole
}

// shared gives every member what became of the whole. Where the whole was
// refused or failed in a way that one member may have caused, each is to be
// tried alone, free of charge: the innocent must not pay for the guilty.
func shared(calls []Call, whole Outcome) []Outcome {
	suspect := whole.Kind == Rejected || (whole.Kind == Failed && whole.Class != ClassContextLost)
	if suspect && len(calls) > 1 {
		whole = Outcome{
			Kind: Busy, Alone: true, StatusCode: whole.StatusCode, SentAt: whole.SentAt, Err: whole.Err,
			Reason: clip("batch of " + strconv.Itoa(len(calls)) + " did not succeed, each is tried alone: " + whole.Reason),
		}
	}
	return slices.Repeat([]Outcome{whole}, len(calls))
}

// misfit is the outcome of a batch whose answer cannot be divided.
func misfit(calls []Call, whole Outcome, reason string) []Outcome {
	o := failed(ClassTransient, reason)
	o.StatusCode, o.SentAt = whole.StatusCode, whole.SentAt
	return shared(calls, o)
}

// measure fills in what is the same for all protocols. shape and tokens are
// taken from the payload where the model names fields for them.
func (w *wire) measure(call Call, at time.Time, shape string, tokens int64) Member {
	m := Member{Entry: call.Entry, Shape: shape, Tokens: tokens, Bytes: int64(len(call.Payload)), At: at}
	if field, ok := lookup(call.Payload, w.model.Batch.ShapeField); ok && w.model.Batch.ShapeField != "" {
		m.Shape += "|" + string(field)
	}
	if field, ok := lookup(call.Payload, w.model.Batch.TokensField); ok {
		var n int64
		if json.Unmarshal(field, &n) == nil && n >= 0 {
			m.Tokens = n
		}
	}
	if call.Operation != "" {
		m.Shape += "|" + call.Operation
	}
	return m
}

// A batch of the dispatcher protocol is {"items":[payload, ...]}, answered by
// {"status":"success","result":[{"status":...,"result"|"error":...}, ...]}, the
// results in the order of the items.

func (d *dispatcher) Measure(call Call, at time.Time) (Member, error) {
	if !json.Valid(call.Payload) {
		return Member{}, errors.New("payload is not JSON")
	}
	return d.measure(call, at, "", int64(len(call.Payload)/bytesPerToken)), nil
}

// bytesPerToken is the usual rule of thumb for text, used where the model names
// no tokens_field.
const bytesPerToken = 4

func (d *dispatcher) Join(calls []Call) (Call, error) {
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

func (d *dispatcher) Split(calls []Call, whole Outcome) []Outcome {
	if whole.Kind != Done {
		return shared(calls, whole)
	}
	var items []json.RawMessage
	if json.Unmarshal(whole.Result, &items) != nil || len(items) != len(calls) {
		return misfit(calls, whole, fmt.Sprintf("worker answered a batch of %d with %d results", len(calls), len(items)))
	}
	outcomes := make([]Outcome, len(calls))
	for i, item := range items {
		o := d.judge(whole.StatusCode, item, "")
		if o.Kind == Accepted || o.Kind == Unknown {
			o = failed(ClassTransient, "worker left an item of the batch without a result")
		}
		o.SentAt = whole.SentAt
		outcomes[i] = o
	}
	return outcomes
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
		return shared(calls, whole)
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
