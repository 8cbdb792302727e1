package prediction

import (
	"encoding/json"
	"errors"
	"maps"

	"github.com/penstock/penstock/pkg/worker"
)

var errInput = errors.New("input must be a JSON object")

// payloadOf turns the input of a prediction into the payload of an entry for a protocol of workers. For OpenAI's an
// input with a prompt becomes a chat of one message, with system_prompt before it; one with messages, or with none
// of both, goes as it is.
func payloadOf(input json.RawMessage, protocol worker.Protocol, stream bool) (json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(input, &fields) != nil || fields == nil {
		return nil, errInput
	}
	if protocol != worker.ProtocolOpenAI {
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

// outputOf is the output of a prediction that has succeeded: of a chat the texts of its choices, as a list, of
// everything else the result of the worker.
func outputOf(p row) json.RawMessage {
	if p.Result == nil {
		return json.RawMessage("null")
	}
	if texts := textsOf(p.Result); p.RunsChat && texts != nil {
		if list, err := json.Marshal(texts); err == nil { // texts always have a form in JSON
			return list
		}
	}
	return p.Result
}

// textsOf reads the texts of the choices of an answer; nil: it has none, or calls tools beside them.
func textsOf(answer json.RawMessage) (texts []string) {
	var a struct {
		Choices []struct {
			Message struct {
				Content *string           `json:"content"`
				Calls   []json.RawMessage `json:"tool_calls"`
			} `json:"message"`
			Text *string `json:"text"`
		} `json:"choices"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil
	}
	for _, c := range a.Choices {
		switch {
		case len(c.Message.Calls) > 0:
			return nil
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
