package worker

import (
	"cmp"
	"encoding/json"
	"errors"
)

// assembly puts the parts of a streamed chat or completion together into the
// object that the server would have sent without streaming.
type assembly struct {
	id, object, model json.RawMessage
	created, usage    json.RawMessage
	choices           []*choice
}

type choice struct {
	chat         bool
	role         string
	text         []byte
	reasoning    []byte
	refusal      []byte
	tools        []*toolCall
	finishReason json.RawMessage
}

type toolCall struct {
	ID        string
	Type      string
	Name      string
	Arguments []byte
}

// part is one streamed object.
type part struct {
	ID      json.RawMessage `json:"id"`
	Object  json.RawMessage `json:"object"`
	Created json.RawMessage `json:"created"`
	Model   json.RawMessage `json:"model"`
	Usage   json.RawMessage `json:"usage"`
	Choices []struct {
		Index        int             `json:"index"`
		Text         string          `json:"text"`
		FinishReason json.RawMessage `json:"finish_reason"`
		Delta        *delta          `json:"delta"`
	} `json:"choices"`
}

type delta struct {
	Role      string `json:"role"`
	Content   string `json:"content"`
	Reasoning string `json:"reasoning_content"`
	Refusal   string `json:"refusal"`
	ToolCalls []struct {
		Index    int    `json:"index"`
		ID       string `json:"id"`
		Type     string `json:"type"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// choicesMost bounds indexes that come from outside, so that one number in a
// stream does not allocate memory without end.
const choicesMost = 1024

func (w *assembly) add(data []byte) error {
	var p part
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	keep(&w.id, p.ID)
	keep(&w.object, p.Object)
	keep(&w.created, p.Created)
	keep(&w.model, p.Model)
	if isSet(p.Usage) {
		w.usage = p.Usage
	}
	for _, c := range p.Choices {
		if c.Index < 0 || c.Index >= choicesMost {
			return errors.New("choice index out of range")
		}
		for len(w.choices) <= c.Index {
			w.choices = append(w.choices, &choice{})
		}
		into := w.choices[c.Index]
		into.text = append(into.text, c.Text...)
		if isSet(c.FinishReason) {
			into.finishReason = c.FinishReason
		}
		if c.Delta != nil {
			if err := into.addDelta(*c.Delta); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *choice) addDelta(d delta) error {
	c.chat = true
	if d.Role != "" {
		c.role = d.Role
	}
	c.text = append(c.text, d.Content...)
	c.reasoning = append(c.reasoning, d.Reasoning...)
	c.refusal = append(c.refusal, d.Refusal...)
	for _, t := range d.ToolCalls {
		if t.Index < 0 || t.Index >= choicesMost {
			return errors.New("tool call index out of range")
		}
		for len(c.tools) <= t.Index {
			c.tools = append(c.tools, &toolCall{Type: "function"})
		}
		into := c.tools[t.Index]
		keepText(&into.ID, t.ID)
		keepText(&into.Type, t.Type)
		into.Name += t.Function.Name
		into.Arguments = append(into.Arguments, t.Function.Arguments...)
	}
	return nil
}

// begun reports whether the model has produced anything.
func (w *assembly) begun() bool {
	for _, c := range w.choices {
		if len(c.text)+len(c.reasoning)+len(c.refusal)+len(c.tools) > 0 {
			return true
		}
	}
	return false
}

func (w *assembly) finished() bool {
	for _, c := range w.choices {
		if c.finishReason == nil {
			return false
		}
	}
	return len(w.choices) > 0
}

func (w *assembly) outcome() Outcome {
	if len(w.choices) == 0 {
		return failed(ClassTransient, "worker ended its stream without a choice")
	}
	answer := map[string]any{"choices": w.list()}
	for name, raw := range map[string]json.RawMessage{
		"id": w.id, "created": w.created, "model": w.model, "usage": w.usage, "object": wholeObject(w.object),
	} {
		if raw != nil {
			answer[name] = raw
		}
	}
	result, err := json.Marshal(answer)
	if err != nil {
		return failed(ClassTransient, "put streamed answer together: "+err.Error())
	}
	return done(result, 0)
}

func (w *assembly) list() []map[string]any {
	list := make([]map[string]any, 0, len(w.choices))
	for i, c := range w.choices {
		entry := map[string]any{"index": i, "finish_reason": c.finishReason}
		if c.chat {
			entry["message"] = c.message()
		} else {
			entry["text"] = string(c.text)
		}
		list = append(list, entry)
	}
	return list
}

func (c *choice) message() map[string]any {
	role := cmp.Or(c.role, "assistant")
	message := map[string]any{"role": role, "content": string(c.text)}
	if len(c.reasoning) > 0 {
		message["reasoning_content"] = string(c.reasoning)
	}
	if len(c.refusal) > 0 {
		message["refusal"] = string(c.refusal)
	}
	if len(c.tools) > 0 {
		calls := make([]map[string]any, 0, len(c.tools))
		for _, t := range c.tools {
			calls = append(calls, map[string]any{
				"id": t.ID, "type": t.Type,
				"function": map[string]any{"name": t.Name, "arguments": string(t.Arguments)},
			})
		}
		message["tool_calls"] = calls
	}
	return message
}

// wholeObject names the unstreamed form: chat.completion.chunk has its own.
func wholeObject(object json.RawMessage) json.RawMessage {
	if string(object) == `"chat.completion.chunk"` {
		return json.RawMessage(`"chat.completion"`)
	}
	return object
}

func keep(into *json.RawMessage, value json.RawMessage) {
	if *into == nil && isSet(value) {
		*into = value
	}
}

func keepText(into *string, value string) {
	if value != "" {
		*into = value
	}
}

func isSet(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
