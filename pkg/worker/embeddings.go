package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

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
	if json.Unmarshal(call.Payload, &fields) != nil || fields["input"] == nil {
		return nil, nil, errors.New("payload has no input")
	}
	if operation := p.model.operationOf(call, fields); operation != OperationEmbeddings {
		return nil, nil, fmt.Errorf("operation %s takes no batches", operation)
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

// Split renumbers the embeddings of each member from 0. The tokens of the whole are divided by the
// bytes of the inputs: nothing in the answer says whose they were.
func (p *openAI) Split(calls []Call, whole Outcome) []Outcome {
	if whole.Kind != Done {
		return SameForAll(calls, whole)
	}
	var reply struct {
		Model json.RawMessage              `json:"model"`
		Data  []map[string]json.RawMessage `json:"data"`
		Usage json.RawMessage              `json:"usage"`
	}
	byIndex := map[string]map[string]json.RawMessage{}
	if json.Unmarshal(whole.Result, &reply) == nil {
		for _, item := range reply.Data {
			byIndex[string(item["index"])] = item
		}
	}
	tokens := shares(TokensOf(reply.Usage).In, calls)
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
		answer := map[string]any{"object": "list", "model": reply.Model, "data": data}
		if isSet(reply.Usage) {
			answer["usage"] = map[string]int64{"prompt_tokens": tokens[i], "total_tokens": tokens[i]}
		}
		result, err := json.Marshal(answer)
		if err != nil {
			return misfit(calls, whole, err.Error())
		}
		outcomes[i] = Outcome{
			Kind: Done, Result: result, StatusCode: whole.StatusCode, SentAt: whole.SentAt,
			Tokens: Tokens{In: tokens[i]},
		}
	}
	if next != len(byIndex) {
		return misfit(calls, whole, fmt.Sprintf("worker answered %d inputs with %d embeddings", next, len(byIndex)))
	}
	return outcomes
}

// shares divides a count of tokens among calls by the bytes of their payloads. The shares add up to it.
func shares(total int64, calls []Call) []int64 {
	bytes := int64(0)
	for _, c := range calls {
		bytes += int64(len(c.Payload))
	}
	parts := make([]int64, len(calls))
	behind, given := int64(0), int64(0)
	for i, c := range calls {
		behind += int64(len(c.Payload))
		upTo := int64(float64(total) * float64(behind) / float64(max(bytes, 1)))
		if i == len(calls)-1 {
			upTo = total
		}
		parts[i], given = upTo-given, upTo
	}
	return parts
}
