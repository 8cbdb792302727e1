package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// scripted is a transport that answers every request alike.
type scripted struct {
	status      int
	contentType string
	body        []byte
}

func (s scripted) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return &http.Response{
		StatusCode: s.status, Header: http.Header{"Content-Type": {s.contentType}}, Body: io.NopCloser(bytes.NewReader(s.body)),
		ContentLength: int64(len(s.body)), Request: r, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}, nil
}

// fuzzModels are one model of each protocol and form of answer.
func fuzzModels() []Model {
	short := Timeouts{Run: Seconds(time.Second), Control: Seconds(time.Second)}
	return []Model{
		{Name: "m", Protocol: ProtocolGeneric, Timeouts: short},
		{Name: "m", Protocol: ProtocolGeneric, Type: TypeAsync, PollPath: "/status/{id}", Timeouts: short},
		{Name: "m", Protocol: ProtocolCog, Timeouts: short},
		{Name: "m", Protocol: ProtocolOIP, Timeouts: short},
		{Name: "m", Protocol: ProtocolOpenAI, Timeouts: short},
		{Name: "m", Protocol: ProtocolOpenAI, Operation: "embeddings", Timeouts: short},
	}
}

func answering(t *testing.T, m Model, s http.RoundTripper) Adapter {
	t.Helper()
	m.MaxResponseBytes = 64 << 10
	adapter, err := New(m, Instance{Endpoint: "http://worker.example/run", Slots: 1}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	switch a := adapter.(type) {
	case *generic:
		a.transport = s
	case *cog:
		a.transport = s
	case *oip:
		a.transport = s
	case *openAI:
		a.transport = s
	}
	return adapter
}

// Whatever a worker answers to a call, a poll, a cancel or a probe, in whatever protocol, the outcome keeps its contract: a
// result is JSON and came with success, an accepted run has a name, and a reason is one line of text.
func FuzzAnswersOfWorkers(f *testing.F) {
	for i := range fuzzModels() {
		for _, body := range []string{
			`{"status":"success","result":{"a":1}}`, `{"status":"processing","job_id":"j"}`, `{"status":"failed","error":{"x":[1]}}`,
			`{"id":"x","status":"succeeded","output":["a"],"logs":"l"}`, `{"error":{"message":"m","type":"t","code":null}}`,
			`{"outputs":[{"name":"o","shape":[1],"datatype":"FP32","data":[1]}]}`, `{"choices":[{"message":{"content":"c"}}],"usage":{}}`,
			`[1]`, `null`, "{", "\x00", `{"active_jobs":1,"max_jobs":2}`, "vllm:num_requests_running 1\n",
			"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n",
		} {
			f.Add(uint8(i), uint16(200), "application/json", []byte(body))
		}
		f.Add(uint8(i), uint16(503), "text/plain", []byte("server busy"))
	}
	models := fuzzModels()
	f.Fuzz(func(t *testing.T, which uint8, status uint16, contentType string, body []byte) {
		s := scripted{100 + int(status)%500, strings.ToValidUTF8(contentType, ""), body}
		a := answering(t, models[int(which)%len(models)], s)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		run := RunRef{Entry: "17", Token: 42, Attempt: 1, Remote: "job"}
		call := testCall(`{"inputs":[],"input":{},"messages":[]}`)
		for name, o := range map[string]Outcome{"submit": a.Submit(ctx, call), "poll": a.Poll(ctx, run)} {
			switch {
			case o.Kind == Done && !json.Valid(o.Result):
				t.Errorf("%s: result %q is not JSON", name, o.Result)
			case o.Kind == Done && s.status/100 != 2:
				t.Errorf("%s: status %d is done", name, s.status)
			case o.Kind == Accepted && o.Remote == "":
				t.Errorf("%s: an accepted run has no name", name)
			case strings.ContainsAny(o.Reason, "\r\n\x00") || !utf8.ValidString(o.Reason) || len(o.Reason) > 4<<10:
				t.Errorf("%s: reason %q is no line of text", name, o.Reason)
			}
		}
		if c := a.Cancel(ctx, run); c.Confirmed && !c.Delivered {
			t.Error("a cancel is confirmed that was not delivered")
		}
		h := a.Probe(ctx)
		if h.Active != nil && *h.Active < 0 || h.Capacity != nil && *h.Capacity < 0 || h.Queued != nil && *h.Queued < 0 {
			t.Errorf("a load below nothing: %v", h)
		}
	})
}

// A template that is accepted makes a JSON document of every payload, and puts the payload where its placeholder is and
// nowhere else.
func FuzzTemplate(f *testing.F) {
	for _, template := range []string{
		`"$payload"`, `{"a": "$payload.x.y", "b": ["$entry", "$attempt"], "c": "$$x", "d": 1e400}`, `{}`, `[]`, `{"a":`, `{"$payload": 1}`,
	} {
		f.Add([]byte(template), []byte(`{"x": {"y": "\"}"}}`))
	}
	f.Fuzz(func(t *testing.T, template, payload []byte) {
		if checkTemplate(template) != nil || !json.Valid(payload) {
			return
		}
		values := map[string]json.RawMessage{
			"payload": payload, "entry": json.RawMessage(`"17"`), "attempt": json.RawMessage(`1`), "remote_name": json.RawMessage(`"m"`),
		}
		body, err := expand(template, values)
		if err != nil {
			t.Fatalf("template %q of payload %q: %v", template, payload, err)
		}
		if !json.Valid(body) {
			t.Errorf("template %q made %q of payload %q", template, body, payload)
		}
		without, err := expand(template, map[string]json.RawMessage{
			"payload": json.RawMessage(`0`), "entry": values["entry"], "attempt": values["attempt"], "remote_name": values["remote_name"],
		})
		if err != nil || !bytes.Contains(template, []byte("$payload")) && !bytes.Equal(body, without) {
			t.Errorf("the payload %q changed template %q, which does not name it", payload, template)
		}
	})
}
