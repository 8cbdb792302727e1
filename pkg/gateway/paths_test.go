package gateway

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// Each operation of the contract is sent on to its path at the worker, and nothing else is.
func TestEachOperationGoesToItsPath(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(w, r.Method+" "+r.URL.Path+" "+string(body))
	})
	json := []string{
		"chat/completions", "completions", "responses", "embeddings", "rerank", "score", "pooling", "classify",
		"images/generations", "audio/speech", "messages",
	}
	for _, path := range json {
		at := "/v1/" + path
		if path == "pooling" || path == "classify" { // where servers have them
			at = "/" + path
		}
		if got := p.post("/v1/"+path, `{"model":"m"}`).body; got != "POST "+at+` {"model":"org/m-7b"}` {
			t.Errorf("%s: got %s", path, got)
		}
	}
	form := "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\n" +
		"Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\x00\xff\r\n--b--\r\n"
	for _, path := range []string{"audio/transcriptions", "audio/translations", "images/edits"} {
		request := p.request(t.Context(), http.MethodPost, "/v1/"+path, form)
		request.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		want := "POST /v1/" + path + " " + strings.Replace(form, "\r\n\r\nm\r\n", "\r\n\r\norg/m-7b\r\n", 1)
		if got := p.send(request).body; got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
	for _, path := range []string{"moderations", "assistants", "fine_tuning/jobs", "chat", "chat/completions/x"} {
		refusedWith(t, p.post("/v1/"+path, `{"model":"m"}`), http.StatusNotFound, "unknown_url", "unknown_url")
	}
}

// A request for a model that has no instance yet waits for one for as long as a cold start may take.
func TestAColdStartThatTakesTooLongIsToldAsSuch(t *testing.T) {
	t.Parallel()
	may := true
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Instances = []InstanceState{{ID: 1, Address: "http://127.0.0.1:1", Slots: 1}} // not usable
		m.Policy.MayStart, m.Policy.ColdTTL = &may, worker.Seconds(20*time.Millisecond)
	})
	refused := p.post(chat, `{"model":"m"}`)
	refusedWith(t, refused, http.StatusServiceUnavailable, "cold_start_timeout", "cold_start_timeout")
	if refused.Header.Get("Retry-After") == "" {
		t.Error("the client is not told when to come back")
	}
}

// Second attempts are a tenth of a pool's requests, and ten that are saved up; one pool has none of another's.
func TestSecondAttemptsAreATenthOfTheRequests(t *testing.T) {
	t.Parallel()
	first, second := new(sharedPool), new(sharedPool)
	second.retries.earn()
	allowed := 0
	for range 1000 {
		first.retries.earn()
		for range 3 {
			if first.retries.allow() {
				allowed++
			}
		}
	}
	if allowed < 100 || allowed > 110 {
		t.Errorf("%d second attempts of 1,000 requests, want 100 and 10 that were saved up", allowed)
	}
	for range 10 {
		if !second.retries.allow() {
			t.Fatal("the attempts of one pool take those of another")
		}
	}
	if second.retries.allow() {
		t.Error("more than ten second attempts are saved up")
	}
}

// An instance may be registered with /v1 or without it, also below a path.
func TestPathsAreBelowTheRootOfAnInstance(t *testing.T) {
	t.Parallel()
	for address, want := range map[string][2]string{
		"http://gpu": {"/v1/chat/completions", "/pooling"}, "http://gpu/v1": {"/v1/chat/completions", "/pooling"},
		"http://gpu/v1/": {"/v1/chat/completions", "/pooling"}, "http://gpu/a": {"/a/v1/chat/completions", "/a/pooling"},
	} {
		r := &route{model: &ModelState{Protocol: worker.ProtocolOpenAI}}
		for i, path := range []string{chat, "/v1/pooling"} {
			if got, err := r.target(address, path); err != nil || got.Path != want[i] {
				t.Errorf("%s of %s is %v (%v), want %s", path, address, got, err, want[i])
			}
		}
	}
}
