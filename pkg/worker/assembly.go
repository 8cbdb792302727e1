package worker

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
)

// assembly puts the parts of a streamed chat or completion together into the object that the server
// would have sent without streaming. Members that it does not know are kept: servers rename them.
type assembly struct {
	members map[string]json.RawMessage // of the answer, besides choices: the first id and time, the last of the rest
	choices []*choice
	wanted  int   // choices that were asked for
	bytes   int64 // of what is kept, as it was sent or, where nothing was, as the answer has it
}

// Bytes that a choice and a call of a tool of which nothing was sent have in the answer, about: one index in a stream
// makes all those before it.
const emptyChoiceBytes, emptyToolBytes = 100, 80

type choice struct {
	chat         bool               // it has deltas, not a text
	message      map[string]*merged // members of the deltas, put together; for a completion its text
	tools        []*toolCall
	finishReason json.RawMessage
	members      map[string]*merged // others of the choice: logprobs, stop_reason, token_ids
}

type toolCall struct {
	ID        string
	Type      string
	Name      string
	Arguments []byte
}

type toolDelta struct {
	Index    int    `json:"index"`
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

// choicesMax bounds indexes that come from outside, so that one number in a
// stream does not allocate memory without end.
const choicesMax = 1024

// errStreamError says that a streamed object carries an error instead of a part of the answer.
var errStreamError = errors.New("streamed object is an error")

func newAssembly(wanted int) *assembly {
	return &assembly{members: map[string]json.RawMessage{}, wanted: max(wanted, 1)}
}

// take adds an event. The last one is [DONE].
func (w *assembly) take(e event) (last bool, err error) {
	switch {
	case string(e.data) == "[DONE]":
		return true, nil
	case e.name == "error":
		return false, errStreamError
	}
	return false, w.add(e.data)
}

// add takes one streamed object. The error is errStreamError for one that carries an error.
func (w *assembly) add(data []byte) error {
	var whole map[string]json.RawMessage
	if err := json.Unmarshal(data, &whole); err != nil {
		return err
	}
	if isSet(whole["error"]) {
		return errStreamError
	}
	var choices []map[string]json.RawMessage
	if isSet(whole["choices"]) {
		if err := json.Unmarshal(whole["choices"], &choices); err != nil {
			return err
		}
	}
	for name, value := range whole {
		first := name == "id" || name == "object" || name == "created" || name == "model"
		if name == "choices" || !isSet(value) || (first && w.members[name] != nil) {
			continue
		}
		if w.members[name] == nil {
			w.bytes += int64(len(name))
		}
		w.bytes += int64(len(value) - len(w.members[name]))
		w.members[name] = value
	}
	for _, c := range choices {
		if err := w.addChoice(c); err != nil {
			return err
		}
	}
	return nil
}

func (w *assembly) addChoice(members map[string]json.RawMessage) error {
	index := 0
	if raw := members["index"]; raw != nil {
		if err := json.Unmarshal(raw, &index); err != nil {
			return fmt.Errorf("read choice index: %w", err)
		}
	}
	if index < 0 || index >= choicesMax {
		return errors.New("choice index out of range")
	}
	for len(w.choices) <= index {
		w.bytes += emptyChoiceBytes
		w.choices = append(w.choices, &choice{
			message: map[string]*merged{}, members: map[string]*merged{},
		})
	}
	into := w.choices[index]
	for name, value := range members {
		if name == "index" || !isSet(value) {
			continue
		}
		var err error
		switch name {
		case "finish_reason":
			w.bytes += int64(len(value) - len(into.finishReason))
			into.finishReason = value
		case "delta":
			err = w.addDelta(into, value)
		case "text":
			err = w.merge(into.message, name, value)
		default:
			err = w.merge(into.members, name, value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *assembly) addDelta(into *choice, raw json.RawMessage) error {
	into.chat = true
	var delta map[string]json.RawMessage
	if err := json.Unmarshal(raw, &delta); err != nil {
		return err
	}
	for name, value := range delta {
		if !isSet(value) {
			continue
		}
		var err error
		if name == "tool_calls" {
			w.bytes += int64(len(value))
			err = w.addTools(into, value)
		} else {
			err = w.merge(into.message, name, value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *assembly) addTools(c *choice, raw json.RawMessage) error {
	var deltas []toolDelta
	if err := json.Unmarshal(raw, &deltas); err != nil {
		return err
	}
	for _, t := range deltas {
		if t.Index < 0 || t.Index >= choicesMax {
			return errors.New("tool call index out of range")
		}
		for len(c.tools) <= t.Index {
			w.bytes += emptyToolBytes
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

// merge adds a piece to a member.
func (w *assembly) merge(into map[string]*merged, name string, piece json.RawMessage) error {
	w.bytes += int64(len(piece))
	if into[name] == nil {
		w.bytes += int64(len(name))
	}
	return mergeMember(into, name, piece)
}

// merged is a member put together from pieces. Texts and lists are joined as JSON, without decoding
// them, and objects stay decoded: a stream of n pieces must not cost n².
type merged struct {
	raw     json.RawMessage
	members map[string]*merged // of an object
}

// mergeMember adds a piece to one member of an object: texts and lists are joined, objects member by
// member, and of everything else, names and ids included, the later one counts.
func mergeMember(into map[string]*merged, name string, piece json.RawMessage) error {
	m := into[name]
	if m == nil {
		m = &merged{}
		into[name] = m
	}
	if piece[0] == '{' {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(piece, &object); err != nil {
			return err
		}
		if m.members == nil {
			m.raw, m.members = nil, map[string]*merged{}
		}
		for member, value := range object {
			if !isSet(value) {
				continue
			}
			if err := mergeMember(m.members, member, value); err != nil {
				return err
			}
		}
		return nil
	}
	m.members = nil
	joins := len(m.raw) > 0 && m.raw[0] == piece[0] && !wholeMember(name)
	switch {
	case joins && piece[0] == '"':
		m.raw = append(m.raw[:len(m.raw)-1], piece[1:]...)
	case joins && piece[0] == '[' && !emptyList(m.raw) && !emptyList(piece):
		m.raw = append(append(m.raw[:len(m.raw)-1], ','), piece[1:]...)
	case joins && piece[0] == '[' && emptyList(piece):
	default:
		m.raw = bytes.Clone(piece)
	}
	return nil
}

func emptyList(raw json.RawMessage) bool { return len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0 }

// MarshalJSON writes the member unchanged.
func (m *merged) MarshalJSON() ([]byte, error) {
	if m.members != nil {
		return json.Marshal(m.members)
	}
	return m.raw, nil
}

// wholeMember lists texts that each piece repeats as a whole.
func wholeMember(name string) bool {
	switch name {
	case "role", "id", "type", "name", "object", "format", "stop_reason":
		return true
	}
	return false
}

// begun reports whether the model has begun to answer: a choice was streamed, whatever it holds.
func (w *assembly) begun() bool { return len(w.choices) > 0 }

func (w *assembly) size() int64 { return w.bytes }

// ends reports whether every choice that was asked for has ended: some servers close without [DONE].
func (w *assembly) ends(bool) bool {
	for _, c := range w.choices {
		if c.finishReason == nil {
			return false
		}
	}
	return len(w.choices) >= w.wanted
}

func (w *assembly) outcome() Outcome {
	if len(w.choices) == 0 {
		return failed(ClassTransient, "worker ended its stream without a choice")
	}
	for _, c := range w.choices {
		if reason, aborted := abortReason(c.finishReason); aborted {
			return abortedBy(reason)
		}
	}
	answer := map[string]any{"choices": w.list()}
	for name, raw := range w.members {
		answer[name] = raw
	}
	if object := w.members["object"]; object != nil {
		answer["object"] = wholeObject(object)
	}
	result, err := json.Marshal(answer)
	if err != nil {
		return failed(ClassTransient, "put streamed answer together: "+err.Error())
	}
	o := done(result, 0)
	o.Tokens = TokensOf(w.members["usage"])
	return o
}

func (w *assembly) list() []map[string]any {
	list := make([]map[string]any, 0, len(w.choices))
	for i, c := range w.choices {
		entry := map[string]any{}
		for name, value := range c.members {
			entry[name] = value
		}
		entry["index"], entry["finish_reason"] = i, c.finishReason
		if c.chat {
			entry["message"] = c.wholeMessage()
		} else {
			entry["text"] = cmp.Or(c.message["text"], emptyText)
		}
		list = append(list, entry)
	}
	return list
}

// emptyText is a text of which no piece was streamed.
var emptyText = &merged{raw: json.RawMessage(`""`)}

func (c *choice) wholeMessage() map[string]any {
	message := map[string]any{"role": "assistant", "content": ""}
	for name, value := range c.message {
		message[name] = value
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

// abortReason reports whether a finish reason says that the server gave the generation up: the
// answer is cut short, whatever its status. vLLM ends its running requests so when it stops.
func abortReason(raw json.RawMessage) (reason string, aborted bool) {
	_ = json.Unmarshal(raw, &reason) // a reason that is no text is none of these
	switch reason {
	case "abort", "aborted", "error", "cancelled", "canceled":
		return reason, true
	}
	return reason, false
}

// abortedBy is the outcome of a generation that the server gave up.
func abortedBy(reason string) Outcome {
	o := failed(ClassTransient, "worker gave the generation up: finish_reason is "+reason)
	o.Aborted = true
	return o
}

func keepText(into *string, value string) {
	if value != "" {
		*into = value
	}
}

func isSet(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
