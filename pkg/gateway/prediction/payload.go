package prediction

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

var errInput = errors.New("input must be a JSON object")

// payloadOf turns the input of a prediction into the payload of an entry for a model. For OpenAI's protocol an input
// with a prompt becomes a chat of one message, with system_prompt before it; one with messages, or with none of both,
// goes as it is.
func payloadOf(input json.RawMessage, offer gateway.Offer, stream bool) (json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(input, &fields) != nil || fields == nil {
		return nil, errInput
	}
	if offer.Protocol != worker.ProtocolOpenAI {
		return input, nil
	}
	fields = maps.Clone(fields)
	var prompt string
	if fields["messages"] == nil && json.Unmarshal(fields["prompt"], &prompt) == nil {
		var messages []message
		var system string
		if json.Unmarshal(fields["system_prompt"], &system) == nil && system != "" {
			messages = append(messages, message{"system", system})
		}
		text, err := json.Marshal(append(messages, message{"user", prompt}))
		if err != nil {
			return nil, err
		}
		fields["messages"] = text
		delete(fields, "prompt")
		delete(fields, "system_prompt")
	}
	if fields["messages"] != nil {
		fields["operation"] = json.RawMessage(`"chat"`)
	}
	delete(fields, "model") // the prediction names it
	if offer.Asked != offer.Model {
		asked, err := json.Marshal(offer.Asked)
		if err != nil {
			return nil, err
		}
		fields["model"] = asked // an adapter: without it the model itself runs
	}
	delete(fields, "stream")
	if stream && fields["messages"] != nil {
		fields["stream"] = json.RawMessage("true")
	}
	return json.Marshal(fields)
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// outputOf is the output of a prediction that has succeeded: of a chat that calls no tools the texts of its choices, as
// a list, of everything else the result of the worker. A result in the object store is none that the client can read.
func outputOf(p row) json.RawMessage {
	if p.Result == nil || gateway.KeptElsewhere(p.Result) {
		return json.RawMessage("null")
	}
	if texts := textsOf(p.Result); p.RunsChat && texts != nil && !callsTools(p.Result) {
		if list, err := json.Marshal(texts); err == nil { // texts always have a form in JSON
			return list
		}
	}
	return p.Result
}

// choice is a choice of an answer, as far as its output is told by it.
type choice struct {
	Message struct {
		Content *string           `json:"content"`
		Calls   []json.RawMessage `json:"tool_calls"`
	} `json:"message"`
	Text *string `json:"text"`
}

// choicesOf reads the choices of an answer; nil: it has none.
func choicesOf(answer json.RawMessage) []choice {
	var a struct {
		Choices []choice `json:"choices"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil
	}
	return a.Choices
}

// callsTools says whether an answer calls tools: then its texts are not the whole of it.
func callsTools(answer json.RawMessage) bool {
	return slices.ContainsFunc(choicesOf(answer), func(c choice) bool { return len(c.Message.Calls) > 0 })
}

// textsOf reads the texts of the choices of an answer, also of those that call tools; nil: it has none.
func textsOf(answer json.RawMessage) (texts []string) {
	for _, c := range choicesOf(answer) {
		switch {
		case c.Message.Content != nil:
			texts = append(texts, *c.Message.Content)
		case c.Text != nil:
			texts = append(texts, *c.Text)
		}
	}
	return texts
}

// streamedTexts reads the texts that the events of the answer had together: those of its choices, or of generate.
// nil: the answer has none.
func streamedTexts(answer json.RawMessage) []string {
	var generated struct {
		Text *string `json:"text_output"`
	}
	if json.Unmarshal(answer, &generated) == nil && generated.Text != nil {
		return []string{*generated.Text}
	}
	return textsOf(answer)
}

// withoutTexts is an answer that calls tools with null for the contents of its messages, which their client has.
func withoutTexts(answer json.RawMessage) (json.RawMessage, error) {
	var fields map[string]json.RawMessage
	var choices []map[string]json.RawMessage
	if err := json.Unmarshal(answer, &fields); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(fields["choices"], &choices); err != nil {
		return nil, err
	}
	for _, c := range choices {
		if c["message"] == nil {
			continue
		}
		var message map[string]json.RawMessage
		if err := json.Unmarshal(c["message"], &message); err != nil {
			return nil, err
		}
		if message == nil { // null
			continue
		}
		message["content"] = json.RawMessage("null")
		text, err := json.Marshal(message)
		if err != nil {
			return nil, err
		}
		c["message"] = text
	}
	text, err := json.Marshal(choices)
	if err != nil {
		return nil, err
	}
	fields["choices"] = text
	return json.Marshal(fields)
}
