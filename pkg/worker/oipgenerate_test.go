package worker

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

func generateModel() Model {
	return Model{Name: "m", Protocol: ProtocolOIP, Operation: OperationGenerate, Stream: true}
}

// The events are those of a Triton server with the vLLM backend.
func TestAGeneratedStreamIsPutTogether(t *testing.T) {
	s := workertest.NewScript(t, streams(
		`data: {"model_name":"m","model_version":"1","text_output":"The answer"}`+"\n\n",
		`data: {"model_name":"m","model_version":"1","text_output":" is \"42\""}`+"\n\n",
		`data: {"model_name":"m","model_version":"1","text_output":".","sequence_end":true}`+"\n\n",
	))
	sink := &log{}
	call := testCall(`{"text_input":"What is the answer?"}`)
	call.Output = sink
	o := newAdapter(t, generateModel(), s.URL, 1).Submit(t.Context(), call)
	const want = `{"model_name":"m","model_version":"1","sequence_end":true,"text_output":"The answer is \"42\"."}`
	if o.Kind != Done || string(o.Result) != want {
		t.Errorf("got %s %s: %s", o.Kind, o.Result, o.Reason)
	}
	var text strings.Builder
	for _, c := range sink.chunks {
		text.Write(c.Data)
	}
	if strings.Count(text.String(), "data: ") != 3 {
		t.Errorf("the output has %q", text.String())
	}
	if got := s.Requests()[0].Path; got != "/v2/models/m/generate_stream" {
		t.Errorf("asked %s", got)
	}
}

func TestAGeneratedStreamThatFailsIsAFailure(t *testing.T) {
	const token = `data: {"text_output":"The"}` + "\n\n"
	for _, c := range []contract{
		{"error after output", streams(token, `data: {"error":"CUDA out of memory"}`+"\n\n"), want{kind: Failed, class: ClassOOM}},
		{"cut within an event", streams(token, `data: {"text_out`), want{kind: Unknown, running: true}},
		{"nothing at all", streams(), want{kind: Unknown, running: true}},
		{"no JSON", streams("data: hello\n\n"), want{kind: Failed, class: ClassTransient}},
		{"not a stream", workertest.Says(200, `{"text_output":"whole"}`), want{kind: Done, result: `{"text_output":"whole"}`}},
		{"not ready", workertest.Says(503, `{"error":"busy"}`), want{kind: NotReady}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, c.answer)
			c.want.check(t, newAdapter(t, generateModel(), s.URL, 1).Submit(t.Context(), testCall(`{"text_input":"x"}`)))
		})
	}
}

func TestStreamIsForGenerations(t *testing.T) {
	var field *FieldError
	infer := Model{Name: "m", Protocol: ProtocolOIP, Stream: true}
	if err := infer.WithDefaults().Validate(); !errors.As(err, &field) || field.Field != "stream" {
		t.Errorf("a stream of tensors: %v", err)
	}
}

// Tensors in binary form are refused by the name of the member that gives or asks for them, before anything is sent.
func TestBinaryTensorsAreRefusedByName(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(500, ""))
	a := newAdapter(t, Model{Name: "m", Protocol: ProtocolOIP}, s.URL, 1)
	for payload, field := range map[string]string{
		`{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]},{"name":"y","shape":[1,3],"datatype":"UINT32","parameters":{"binary_data_size":12}}]}`: "inputs[1].parameters.binary_data_size",
		`{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}],"outputs":[{"name":"z","parameters":{"binary_data":true}}]}`:                          "outputs[0].parameters.binary_data",
		`{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}],"parameters":{"binary_data_output":true}}`:                                            "parameters.binary_data_output",
	} {
		o := a.Submit(t.Context(), testCall(payload))
		if o.Kind != Rejected || o.Class != ClassInput || !strings.Contains(o.Reason, field) {
			t.Errorf("%s: %s %s %q, want a failure of the input that names %s", payload, o.Kind, o.Class, o.Reason, field)
		}
	}
	if n := len(s.Requests()); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}

func TestAnAnswerInBinaryFormIsNotTakenForAResult(t *testing.T) {
	const header = `{"outputs":[{"name":"z","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}}]}`
	s := workertest.NewScript(t, workertest.Says(200, header+"\x00\x00\x80\x3f",
		"Inference-Header-Content-Length", strconv.Itoa(len(header)), "Content-Type", "application/octet-stream"))
	o := newAdapter(t, Model{Name: "m", Protocol: ProtocolOIP}, s.URL, 1).
		Submit(t.Context(), testCall(`{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}`))
	if o.Kind != Failed || !strings.Contains(o.Reason, "binary form") {
		t.Errorf("got %s %q", o.Kind, o.Reason)
	}
}

func TestChoicesAreCountedAndBounded(t *testing.T) {
	m := Model{Name: "m", Protocol: ProtocolOpenAI, ChoicesMax: 2}
	for payload, want := range map[string]int{
		`{}`: 1, `{"n":4}`: 4, `{"n":2,"best_of":5}`: 5, `{"n":"many"}`: 1, `{"n":-3}`: 1, `{"n":1000000000}`: choicesMax,
		`{"best_of":3}`: 3, `[]`: 1, `{"n":null}`: 1, `{"n":4,"N":1}`: 4, `{"prompt":["a","b"]}`: 1,
		`{"operation":"completions","prompt":["a","b","c"],"n":2}`:     6,
		`{"operation":"completions","prompt":["a\"],[\"","\\"]}`:       2,
		`{"operation":"completions","prompt":[1,2,3],"n":2}`:           2,
		`{"operation":"completions","prompt":[ [1,[2]] , [3], {} ]}`:   3,
		`{"operation":"completions","prompt":["a","b"],"n":100000000}`: choicesMax,
		`{"operation":"completions","prompt":[]}`:                      1,
		`{"operation":"completions","prompt":"[1]"}`:                   1,
		`{"operation":"images","prompt":"x","n":4}`:                    1,
		`{"operation":"embeddings","input":["x"],"n":4}`:               1,
	} {
		if got := m.WithDefaults().Choices(testCall(payload)); got != want {
			t.Errorf("%s: %d choices, want %d", payload, got, want)
		}
	}
	if got := (Model{Name: "m", Protocol: ProtocolGeneric}).Choices(testCall(`{"n":4}`)); got != 1 {
		t.Errorf("another protocol: %d choices", got)
	}
	s := workertest.NewScript(t, workertest.Says(200, `{"choices":[{"index":0}]}`))
	for payload, field := range map[string]string{
		`{"messages":[],"n":3}`: "n is 3", `{"messages":[],"best_of":9}`: "best_of is 9",
		`{"operation":"completions","prompt":["a","b","c"]}`:   "prompt is a list of 3",
		`{"operation":"completions","prompt":["a","b"],"n":2}`: "prompt is a list of 2",
	} {
		o := newAdapter(t, m, s.URL, 1).Submit(t.Context(), testCall(payload))
		if o.Kind != Rejected || o.Class != ClassInput || !strings.Contains(o.Reason, field) || !strings.Contains(o.Reason, "at most 2") {
			t.Errorf("%s: %s %s %q", payload, o.Kind, o.Class, o.Reason)
		}
	}
	for _, payload := range []string{`{"messages":[],"n":"64"}`, `{"messages":[],"best_of":64.5}`, `{"messages":[],"n":6.4e1}`} {
		o := newAdapter(t, m, s.URL, 1).Submit(t.Context(), testCall(payload))
		if o.Kind != Rejected || !strings.Contains(o.Reason, "whole number") {
			t.Errorf("%s: %s %q", payload, o.Kind, o.Reason)
		}
	}
	for _, payload := range []string{`{"messages":[],"n":2}`, `{"operation":"completions","prompt":["a","b"]}`} {
		if o := newAdapter(t, m, s.URL, 1).Submit(t.Context(), testCall(payload)); o.Kind != Done {
			t.Errorf("within the bound: %s: %s %q", payload, o.Kind, o.Reason)
		}
	}
}
