package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// The answers of this file are those of TGI, SGLang, Ollama and llama.cpp, byte for byte as their sources write them.

// Servers say in words of their own that they have no room: the call then goes to another instance, and its client sees
// nothing of it.
func TestEachServerWithoutRoomIsLeftForAnother(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		busy http.HandlerFunc
	}{
		{"tgi", workertest.Says(429, `{"error":"Model is overloaded","error_type":"overloaded"}`)},
		{"tgi, in a stream", streamer("data:{\"error\":\"Model is overloaded\",\"error_type\":\"overloaded\"}\n\n")},
		{"sglang", workertest.Says(503, `{"object":"error","message":"The request queue is full.","type":"Service Unavailable",`+
			`"param":null,"code":503}`)},
		{"sglang, in a stream", streamer("data: {\"error\": {\"object\": \"error\", \"message\": \"The request queue is full.\", "+
			"\"type\": \"SERVICE_UNAVAILABLE\", \"param\": null, \"code\": 503}}\n\n", "data: [DONE]\n\n")},
		{"ollama", workertest.Says(503, `{"error":"server busy, please try again.  maximum pending requests exceeded"}`)},
		{"ollama, below /v1", workertest.Says(503, `{"error":{"message":"server busy, please try again.  maximum pending `+
			`requests exceeded","type":"api_error","param":null,"code":null}}`)},
		{"vllm", workertest.Says(503, `{"error":{"message":"The request queue is full.","type":"Service Unavailable",`+
			`"param":null,"code":503}}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var first atomic.Int32
			p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
				first.Add(1)
				c.busy(w, r)
			}, streamer(plainStream))
			begin := time.Now()
			for range 8 {
				answer := p.post(chat, `{"model":"m","stream":true}`)
				if answer.StatusCode != 200 || answer.body != plainStream {
					t.Fatalf("got %d %s", answer.StatusCode, answer.body)
				}
			}
			n, took := first.Load(), time.Since(begin)
			if n == 0 || took < worker.BackoffMin<<(n-1)-worker.BackoffMin { // it is left alone for twice as long each time
				t.Errorf("%d of 8 calls within %s went to the instance without room", n, took)
			}
			workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
		})
	}
}

// A refusal that is about the request, and a run that failed, is the client's to see as the server wrote it; it is not
// tried again.
func TestErrorsOfEachServerPass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		status int
		body   string
	}{
		{"tgi: the prompt is too long", 422, `{"error":"Input validation error: inputs tokens + max_new_tokens must be <= 4096",` +
			`"error_type":"validation"}`},
		{"tgi: generation failed", 424, `{"error":"Request failed during generation: Server error: CUDA error",` +
			`"error_type":"generation"}`},
		{"tgi: incomplete generation", 500, `{"error":"Incomplete generation","error_type":"incomplete_generation"}`},
		{"sglang: a parameter", 400, `{"object":"error","message":"temperature must be non-negative","type":"BadRequestError",` +
			`"param":null,"code":400}`},
		{"ollama: cancelled", 499, `{"error":"request canceled"}`},
		{"llama.cpp: loading", 503, `{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			work := func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				workertest.Says(c.status, c.body)(w, r)
			}
			p := startTestbed(t, nil, work, work)
			answer := p.post(chat, `{"model":"m"}`)
			if answer.StatusCode != c.status || answer.body != c.body {
				t.Errorf("got %d %s, want %d %s", answer.StatusCode, answer.body, c.status, c.body)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("%d calls were sent", n)
			}
			workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 8 })
		})
	}
}

// Streams pass with the token counts taken out that the gateway asked for, wherever the server puts them.
func TestStreamsOfEachServerPass(t *testing.T) {
	t.Parallel()
	const tgiHead, tgiTail = `{"object":"chat.completion.chunk","id":"","created":1700000000,"model":"org/m-7b",` +
		`"system_fingerprint":"3.3.4-native",`, `"logprobs":null`
	const sglangHead = `{"id":"8f","object":"chat.completion.chunk","created":1700000000,"model":"org/m-7b",`
	const ollamaHead = `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"org/m-7b",` +
		`"system_fingerprint":"fp_ollama",`
	for _, c := range []struct {
		name   string
		events []string
		usage  string
	}{
		{"tgi", []string{
			tgiHead + `"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},` + tgiTail + `,"finish_reason":null}],"usage":null}`,
			tgiHead + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},` + tgiTail + `,"finish_reason":"stop"}],"usage":null}`,
		}, tgiHead + `"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}}`},
		{"sglang", []string{
			sglangHead + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}`,
			sglangHead + `"choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":"stop","matched_stop":2}],"usage":null}`,
		}, sglangHead + `"choices":[],"usage":{"prompt_tokens":7,"total_tokens":16,"completion_tokens":9,"prompt_tokens_details":null,"reasoning_tokens":0}}`},
		{"ollama", []string{
			ollamaHead + `"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}`,
			ollamaHead + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":"stop"}]}`,
		}, ollamaHead + `"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var all, plain strings.Builder
			for _, e := range c.events {
				fmt.Fprintf(&all, "data: %s\n\n", e)
				fmt.Fprintf(&plain, "data: %s\n\n", e)
			}
			fmt.Fprintf(&all, "data: %s\n\ndata: [DONE]\n\n", c.usage)
			plain.WriteString("data: [DONE]\n\n")
			p := startTestbed(t, nil, streamer(all.String()))
			if got := p.post(chat, `{"model":"m","stream":true}`).body; got != plain.String() {
				t.Errorf("got %q, want %q", got, plain.String())
			}
			if got := p.post(chat, `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`).body; got != all.String() {
				t.Errorf("a client that asked for token counts got %q, want %q", got, all.String())
			}
			workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
			if e := p.gateway.ring.last[0]; e.In != 7 || e.Out != 9 {
				t.Errorf("counted %d and %d tokens", e.In, e.Out)
			}
		})
	}
}

// An error behind the first event of a stream is the client's to see; the call is not sent again, and its slot is idle
// when the stream has ended.
func TestErrorsInTheMiddleOfAStreamPass(t *testing.T) {
	t.Parallel()
	for name, failed := range map[string]string{
		"tgi":    "data: {\"error\":{\"message\":\"Request failed during generation: out of memory\",\"http_status_code\":424}}\n\n",
		"sglang": "data: {\"error\": {\"message\": \"The request is aborted\", \"code\": 500}}\n\ndata: [DONE]\n\n",
		"ollama": "data: {\"error\":{\"message\":\"an error was encountered while running the model\",\"type\":\"api_error\"}}\n\n",
		"busy":   "data: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n", // it is too late for that
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			const begin = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"}}]}\n\n"
			work := func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				streamer(begin, failed)(w, r)
			}
			p := startTestbed(t, nil, work, work)
			if got := p.post(chat, `{"model":"m","stream":true}`).body; got != begin+failed {
				t.Errorf("got %q, want %q", got, begin+failed)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("%d calls were sent", n)
			}
			workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 8 })
		})
	}
}

// A server that lists its models under other names is asked by remote_name alone: the list that clients see is the
// gateway's.
func TestModelListsOfServersAreNotPassedOn(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			t.Errorf("the gateway asked for %s on behalf of a client", r.URL.Path)
		}
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"llama3:latest","object":"model","owned_by":"library"}]}`)
	})
	got := p.send(p.request(t.Context(), http.MethodGet, "/v1/models", ""))
	if got.StatusCode != 200 || !strings.Contains(got.body, `"id":"m"`) || strings.Contains(got.body, "llama3") {
		t.Errorf("got %d %s", got.StatusCode, got.body)
	}
}
