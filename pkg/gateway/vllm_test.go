package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// vllm behaves as vLLM's server does where it differs from others: it takes X-Request-Id as the id of its run and refuses
// one that still runs (before 0.16), ends a run whose client is gone, and at SIGTERM ends all runs with the finish reason
// "abort" and a stream that looks whole.
type vllm struct {
	mu      sync.Mutex
	running map[string]bool
	ended   chan string // how each run ended: stop, abort, or gone
	next    chan bool   // a token for each run that reads one; closed: the server was told to stop
}

func newVLLM() *vllm {
	return &vllm{running: map[string]bool{}, ended: make(chan string, 100), next: make(chan bool)}
}

// runs is how many runs there are.
func (v *vllm) runs() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.running)
}

// begin takes the id of a run, unless it is taken.
func (v *vllm) begin(id string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.running[id] {
		return false
	}
	v.running[id] = true
	return true
}

func (v *vllm) end(id, how string) {
	v.mu.Lock()
	delete(v.running, id)
	v.mu.Unlock()
	v.ended <- how
}

// ServeHTTP runs a generation until its client is gone, the server is told to stop, or max_tokens have been made.
func (v *vllm) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Stream bool `json:"stream"`
		Most   int  `json:"max_tokens"`
	}
	body, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(body, &ask)
	id := "chatcmpl-" + r.Header.Get("X-Request-Id")
	if !v.begin(id) {
		workertest.Says(400, fmt.Sprintf(`{"error":{"message":"Request id %s already running","type":"BadRequestError",`+
			`"param":null,"code":400}}`, id))(w, r)
		return
	}
	how, text := "gone", ""
	defer func() { v.end(id, how) }()
	if ask.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	say := func(delta, reason string) {
		if ask.Stream {
			_, _ = fmt.Fprintf(w, "data: {\"id\":%q,\"choices\":[{\"index\":0,\"delta\":{\"content\":%q},\"finish_reason\":%s}]}\n\n",
				"chatcmpl", delta, reason)
			_ = http.NewResponseController(w).Flush()
		}
		text += delta
	}
	for n := 0; how == "gone"; n++ {
		select {
		case <-r.Context().Done():
			return
		case _, on := <-v.next:
			if !on {
				how = "abort"
			} else if say("t", "null"); n+1 == ask.Most {
				how = "stop"
			}
		}
	}
	say("", `"`+how+`"`)
	if ask.Stream {
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"choices":[{"index":0,"message":{"content":%q},"finish_reason":%q}]}`, text, how)
}

// vLLM ends the run of a client that left when its connection closes, in a stream and before a whole answer.
func TestVLLMAbortsTheRunOfAClientThatLeft(t *testing.T) {
	t.Parallel()
	for _, body := range []string{`{"model":"m","stream":true}`, `{"model":"m"}`} {
		v := newVLLM()
		p := startTestbed(t, nil, v.ServeHTTP)
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			answer, err := http.DefaultClient.Do(p.request(ctx, http.MethodPost, chat, body))
			if err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
		}()
		v.next <- true
		leave()
		if how := <-v.ended; how != "gone" {
			t.Errorf("%s: the run ended with %s", body, how)
		}
		workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 4 })
	}
}

// Services hand one request id through many calls: vLLM gets one of its own for each, and the client its own back.
func TestRequestsWithOneIDRunBesideEachOther(t *testing.T) {
	t.Parallel()
	v := newVLLM()
	p := startTestbed(t, nil, v.ServeHTTP)
	answers := make(chan reply)
	for range 3 {
		go func() { answers <- p.post(chat, `{"model":"m","max_tokens":1}`, "X-Request-Id", "trace-7") }()
	}
	workertest.WaitFor(t, func() bool { return v.runs() == 3 })
	v.mu.Lock()
	for id := range v.running {
		if !strings.HasPrefix(id, "chatcmpl-trace-7") {
			t.Errorf("a run has the id %s: that of the client cannot be found in the logs of the server", id)
		}
	}
	v.mu.Unlock()
	for range 3 {
		v.next <- true
	}
	for range 3 {
		if a := <-answers; a.StatusCode != 200 || a.Header.Get("X-Request-Id") != "trace-7" {
			t.Errorf("got %d %s under the id %s", a.StatusCode, a.body, a.Header.Get("X-Request-Id"))
		}
	}
}

// Runs that vLLM gives up when it is stopped end as it says, with "abort": no second run is begun for them, since a part of
// each has gone to its client or may have had effects, and no slot is left busy.
func TestRunsThatVLLMGivesUpAtItsEndPass(t *testing.T) {
	t.Parallel()
	first, second := newVLLM(), newVLLM()
	p := startTestbed(t, nil, first.ServeHTTP, second.ServeHTTP)
	answers := make(chan reply)
	for _, body := range []string{`{"model":"m","stream":true,"stream_options":{}}`, `{"model":"m"}`} {
		go func() { answers <- p.post(chat, body) }()
	}
	workertest.WaitFor(t, func() bool { return first.runs()+second.runs() == 2 })
	close(first.next)
	close(second.next)
	for range 2 {
		a := <-answers
		if a.StatusCode != 200 || !strings.Contains(a.body, `"finish_reason":"abort"`) ||
			strings.HasPrefix(a.body, "data:") != strings.HasSuffix(a.body, "data: [DONE]\n\n") {
			t.Errorf("got %d %s", a.StatusCode, a.body)
		}
	}
	if n := len(first.ended) + len(second.ended); n != 2 {
		t.Errorf("%d runs, want one for each request", n)
	}
	workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 8 })
}
