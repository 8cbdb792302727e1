package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// generate asks for a generation whole, or with model.Stream by generate_stream: server-sent events, each a JSON object
// whose text_output continues the one before, until the connection ends.
func (p *oip) generate(ctx context.Context, call Call) Outcome {
	r := request{method: http.MethodPost, url: p.at(p.modelPath() + "/generate")}
	if p.model.Stream {
		r.url, r.accept, r.events = r.url+"_stream", acceptEvents, &generated{}
	}
	return p.submit(ctx, call, func(finishBy time.Time) (_ request, err error) {
		r.body, err = p.model.body(call, finishBy)
		return r, err
	}, func(r reply) Outcome { return judgeGenerate(r, call) })
}

func judgeGenerate(r reply, call Call) Outcome {
	switch {
	case r.status/100 != 2:
		return ClassifyAnswer(r.status, r.header, r.body, call.Payload)
	case !json.Valid(r.body):
		return failed(ClassTransient, "worker answered with something that is not JSON")
	case insteadOfGeneration(r.body):
		return errorAfterOK(r.body, call.Payload, false)
	}
	return done(r.body, r.status)
}

// insteadOfGeneration reports whether an answer, or an event of a stream, is an error of the server. An output of a
// model may have the name error as well: a generation has the name of its model beside its outputs, an error has not.
func insteadOfGeneration(data []byte) bool {
	return hasMember(data, "error") && !hasMember(data, "model_name") && !hasMember(data, "text_output")
}

// generated is a generation put together from its events, as one answer of generate has it.
type generated struct {
	fields map[string]json.RawMessage // of the last event that has each
	text   []byte                     // text_output of all of them
	bytes  int64
}

// take adds an event.
func (g *generated) take(e event) (last bool, err error) {
	if e.name == "error" || insteadOfGeneration(e.data) {
		return false, errStreamError
	}
	return false, g.add(e.data)
}

// ends reports whether there was an event: the end of the connection is that of the generation, for the protocol has no
// other mark. A connection that breaks ends in an error of the transport.
func (g *generated) ends(cut bool) bool { return g.begun() && !cut }
func (g *generated) begun() bool        { return g.fields != nil }
func (g *generated) size() int64        { return g.bytes }

func (g *generated) add(data []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	if g.fields == nil {
		g.fields = map[string]json.RawMessage{}
	}
	var text string
	if json.Unmarshal(fields["text_output"], &text) == nil { // absent, or a list: the last one counts
		g.text = append(g.text, text...)
	}
	size := 0
	for name, value := range fields {
		g.fields[name] = value
	}
	for name, value := range g.fields {
		size += len(name) + len(value)
	}
	g.bytes = int64(len(g.text) + size)
	return nil
}

func (g *generated) outcome() Outcome {
	var one string
	if json.Unmarshal(g.fields["text_output"], &one) == nil {
		text, err := json.Marshal(string(g.text))
		if err != nil {
			return failed(ClassTransient, "worker streamed text that is not JSON")
		}
		g.fields["text_output"] = text
	}
	answer, err := json.Marshal(g.fields)
	if err != nil {
		return failed(ClassTransient, "worker streamed something that is not JSON")
	}
	return done(answer, http.StatusOK)
}

// The binary extension of the protocol puts tensors behind the JSON of a body, in bytes that no JSON value can hold.
// Payloads and results are JSON, so that tensors go as data, in both directions.

// binaryField returns the name of the member with which an infer payload gives or asks for tensors in binary form,
// empty if it does neither.
func binaryField(payload json.RawMessage) string {
	var r struct {
		Parameters struct {
			All json.RawMessage `json:"binary_data_output"`
		} `json:"parameters"`
		Inputs []struct {
			Parameters struct {
				Size json.RawMessage `json:"binary_data_size"`
			} `json:"parameters"`
		} `json:"inputs"`
		Outputs []struct {
			Parameters struct {
				Binary json.RawMessage `json:"binary_data"`
			} `json:"parameters"`
		} `json:"outputs"`
	}
	if json.Unmarshal(payload, &r) != nil {
		return "" // of another shape: the server says what it lacks
	}
	if string(r.Parameters.All) == "true" {
		return "parameters.binary_data_output"
	}
	for i, in := range r.Inputs {
		if isSet(in.Parameters.Size) {
			return fmt.Sprintf("inputs[%d].parameters.binary_data_size", i)
		}
	}
	for i, out := range r.Outputs {
		if string(out.Parameters.Binary) == "true" {
			return fmt.Sprintf("outputs[%d].parameters.binary_data", i)
		}
	}
	return ""
}
