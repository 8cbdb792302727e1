package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// testbed is a gateway with fixed slots before servers of a test.
type testbed struct {
	t       *testing.T
	gateway *Gateway
	url     string
	model   ModelState
}

func startTestbed(t *testing.T, change func(*Config, *ModelState), workers ...http.HandlerFunc) *testbed {
	t.Helper()
	model := ModelState{
		Name: "m", Remote: "org/m-7b", Protocol: worker.ProtocolOpenAI, AbortStops: new(true), RunMax: time.Minute,
		Policy: DefaultPolicy(), Adapters: []string{"lora-1"},
	}
	for i, handler := range workers {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		model.Instances = append(model.Instances, InstanceState{
			ID: int32(i) + 1, Server: fmt.Sprint("w", i+1), Address: server.URL, Slots: 4, Usable: true, //nolint:gosec // small
		})
	}
	config := Config{Open: true}
	if change != nil {
		change(&config, &model)
	}
	g := New(config)
	g.SetModels([]ModelState{model})
	g.Fixed()
	front := httptest.NewServer(g)
	t.Cleanup(front.Close)
	return &testbed{t, g, front.URL, model}
}

// reply is an answer that was read to its end.
type reply struct {
	StatusCode int
	Header     http.Header
	body       string
}

func (p *testbed) request(ctx context.Context, method, path, body string, headers ...string) *http.Request {
	p.t.Helper()
	request, err := http.NewRequestWithContext(ctx, method, p.url+path, strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	return request
}

// send returns the answer when its last byte is there.
func (p *testbed) send(request *http.Request) reply {
	p.t.Helper()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		p.t.Error(err)
		return reply{Header: http.Header{}}
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		p.t.Error(err)
	}
	return reply{answer.StatusCode, answer.Header, string(body)}
}

func (p *testbed) post(path, body string, headers ...string) reply {
	p.t.Helper()
	return p.send(p.request(p.t.Context(), http.MethodPost, path, body, headers...))
}

func (p *testbed) state() PoolState { return p.gateway.States()[0] }

// refusedWith checks status, code in OpenAI's envelope, and reason.
func refusedWith(t *testing.T, answer reply, status int, code, reason string) {
	t.Helper()
	var body envelope
	if err := json.Unmarshal([]byte(answer.body), &body); err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != status || body.Error.Code != code || body.Error.Message == "" ||
		answer.Header.Get("X-Penstock-Dropped-Reason") != reason {
		t.Errorf("got %d %+v %q, want %d %s %q", answer.StatusCode, body.Error, answer.Header.Get("X-Penstock-Dropped-Reason"),
			status, code, reason)
	}
}

const chat = "/v1/chat/completions"

func TestBodyAndAnswerPassByteForByte(t *testing.T) {
	t.Parallel()
	var got atomic.Value
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got.Store([]string{string(body), r.URL.Path, r.Header.Get("Authorization"), r.Header.Get("X-Penstock-Flow"), r.Header.Get("Traceparent"), r.Header.Get("X-Custom")})
		w.Header().Set("X-Own", "1")
		w.Header().Set("Content-Type", "application/json; odd=yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, "{ \"any\" :\tthing }")
	})
	sent := "{ \"messages\" : [ {\"role\":\"user\",\"content\":\"h\\u00e9 \\/ \"} ],\n\t\"model\" : \"m\" , \"x\":1.0e0}"
	answer := p.post(chat, sent, "Authorization", "Bearer secret", "X-Penstock-Flow", "f", "Traceparent", "00-a-b-01", "X-Custom", "y")
	want := []string{strings.Replace(sent, `"m"`, `"org/m-7b"`, 1), chat, "", "", "00-a-b-01", "y"}
	if fmt.Sprint(got.Load()) != fmt.Sprint(want) {
		t.Errorf("the worker got %q, want %q", got.Load(), want)
	}
	if answer.StatusCode != http.StatusTeapot || answer.Header.Get("X-Own") != "1" ||
		answer.Header.Get("Content-Type") != "application/json; odd=yes" || answer.body != "{ \"any\" :\tthing }" {
		t.Errorf("the client got %d %v", answer.StatusCode, answer.Header)
	}
	for _, name := range []string{"X-Request-Id", "X-Penstock-Queue-Ms", "X-Penstock-Attempts"} {
		if answer.Header.Get(name) == "" {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestAnAdapterIsAskedForByItsName(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	if got := p.post(chat, `{"model":"lora-1"}`).body; got != `{"model":"lora-1"}` {
		t.Errorf("got %s", got)
	}
}

func streamer(chunks ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for _, c := range chunks {
			_, _ = io.WriteString(w, c)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

func TestStreamPassesWithoutTheChunkThatItsClientDidNotAskFor(t *testing.T) {
	t.Parallel()
	var asked atomic.Value
	usage := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9}}\n\n"
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked.Store(string(body))
		streamer(strings.Replace(plainStream, "data: [DONE]", usage+"data: [DONE]", 1))(w, r)
	})
	if got := p.post(chat, `{"model":"m","stream":true}`).body; got != plainStream {
		t.Errorf("got %q, want %q", got, plainStream)
	}
	if want := `{"stream_options":{"include_usage":true},"model":"org/m-7b","stream":true}`; asked.Load() != want {
		t.Errorf("the worker got %s, want %s", asked.Load(), want)
	}
	for _, null := range []string{
		`{"model":"m","stream":true,"stream_options":null}`, `{"stream_options": null ,"model":"m","stream":true}`,
	} {
		if got := p.post(chat, null).body; got != plainStream {
			t.Errorf("%s: got %q, want %q", null, got, plainStream)
		}
		var last struct {
			Options json.RawMessage `json:"stream_options"`
		}
		sent := fmt.Sprint(asked.Load())
		if err := json.Unmarshal([]byte(sent), &last); err != nil || string(last.Options) != usageValue {
			t.Errorf("the worker got %s, which asks for no token counts: %v", sent, err)
		}
	}
	own := `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`
	if got := p.post(chat, own).body; !strings.Contains(got, `"usage":{`) {
		t.Errorf("the client asked for token counts and got %q", got)
	}
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
	e := p.gateway.ring.last[0]
	if e.In != 7 || e.Out != 9 {
		t.Errorf("counted %d and %d tokens", e.In, e.Out)
	}
}

func TestChunksAreSentAtOnce(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for c := range next {
			_, _ = io.WriteString(w, c)
			_ = http.NewResponseController(w).Flush()
		}
	})
	defer close(next)
	go func() { next <- "data: 0\n\n" }()
	answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewReader(answer.Body)
	for i := range 5 {
		if line, err := lines.ReadString('\n'); err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("got %q, %v", line, err)
		}
		_, _ = lines.ReadString('\n')
		next <- fmt.Sprintf("data: %d\n\n", i+1) // it is not sent before the one before has arrived
	}
}

// The time per token of a stream reaches the limit of its instance.
func TestStreamThatIsTooSlowLowersTheLimit(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.TPOTMax = worker.Seconds(100 * time.Microsecond)
	}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, chunk := range []string{`{"choices":[{"delta":{"content":"a"}}]}`, `{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":21}}`} {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", chunk)
			_ = http.NewResponseController(w).Flush()
			time.Sleep(20 * time.Millisecond)
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	if before := p.state().Ceiling; before != 4 {
		t.Fatalf("the ceiling is %d of 4", before)
	}
	if answer := p.post("/v1/chat/completions", `{"model":"m","stream":true}`); answer.StatusCode != 200 {
		t.Fatal(answer)
	}
	if after := p.state().Ceiling; after != 3 {
		t.Errorf("the ceiling is %d of 4 after a slow stream", after)
	}
}

func TestErrorsSpeakOpenAI(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.BodyMax = 1000 }, workertest.Says(200, "{}"))
	for _, c := range []struct {
		path, body string
		status     int
		code       string
	}{
		{chat, `{"model":"other"}`, 404, "model_not_found"},
		{chat, `{"model":`, 400, "invalid_json"},
		{chat, `{}`, 400, "missing_model"},
		{chat, `{"model":"m","model":"m"}`, 400, "invalid_model"},
		{chat, `{"model":"m","x":"` + strings.Repeat("y", 1000) + `"}`, 413, "request_too_large"},
		{"/v1/fine_tuning/jobs", `{}`, 404, "unknown_url"},
		{"/models/m/call", `{}`, 404, "model_not_found"}, // it speaks OpenAI's protocol
	} {
		refusedWith(t, p.post(c.path, c.body), c.status, c.code, c.code)
	}
	refusedWith(t, p.post(chat, `{"model":"m"}`, "X-Penstock-Criticality", "royal"), 400, "invalid_criticality", "invalid_criticality")
	refusedWith(t, p.post(chat, `{"model":"m"}`, "X-Penstock-Deadline-Ms", "soon"), 400, "invalid_header", "invalid_header")
}

// A name of a model that is longer than any that is registered is refused where it is read, in each form of a body, and
// what is kept of a request does not grow with the texts of its client.
func TestTextsOfClientsDoNotFillTheMemory(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, workertest.Says(200, "{}"))
	long := strings.Repeat("n", modelNameMax+1)
	refusedWith(t, p.post(chat, `{"model":"`+long+`"}`), 400, "invalid_model", "invalid_model")
	refusedWith(t, p.post(chat, `{"model":"`+strings.Repeat("n", 1<<20)+`"}`), 400, "invalid_model", "invalid_model")
	refusedWith(t, p.post("/models/"+long+"/call", `{}`), 400, "invalid_model", "invalid_model")
	for _, n := range []int{modelNameMax + 1, 1 << 20} {
		form := "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n" + strings.Repeat("n", n) + "\r\n--b--\r\n"
		refusedWith(t, p.post("/v1/audio/transcriptions", form, "Content-Type", "multipart/form-data; boundary=b"),
			400, "invalid_model", "invalid_model")
	}
	refusedWith(t, p.post(chat, `{"model":"`+long[1:]+`"}`), 404, "model_not_found", "model_not_found")
	refusedWith(t, p.post(chat, `{"model":"m"}`, "X-Penstock-Criticality", strings.Repeat("c", 1<<15)), 400, "invalid_criticality", "invalid_criticality")
	workertest.WaitFor(t, func() bool {
		p.gateway.ring.mu.Lock()
		defer p.gateway.ring.mu.Unlock()
		return len(p.gateway.ring.last) == 7
	})
	for _, e := range p.gateway.ring.last {
		if len(e.Model) > modelNameMax || len(e.Error) > keptErrorMax {
			t.Errorf("%d bytes of a model and %d of an error are kept", len(e.Model), len(e.Error))
		}
	}
}

func TestTokensDecideWhoMayDoWhat(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Open = false }, workertest.Says(200, "{}"))
	refusedWith(t, p.post(chat, `{"model":"m"}`), 401, "invalid_api_key", "invalid_api_key")
	p.gateway.SetTokens([]TokenState{
		{Hash: sha256.Sum256([]byte("all")), Name: "all"},
		{Hash: sha256.Sum256([]byte("few")), Name: "few", Models: []string{"x"}},
		{Hash: sha256.Sum256([]byte("low")), Name: "low", Criticality: Sheddable, Flows: []string{"t"}},
		{Hash: sha256.Sum256([]byte("slow")), Name: "slow", Rate: 0.001},
		{Hash: sha256.Sum256([]byte("old")), Name: "old", ExpiresAt: time.Now().Add(-time.Second)},
	})
	with := func(secret string, headers ...string) reply {
		return p.post(chat, `{"model":"m"}`, append(headers, "Authorization", "Bearer "+secret)...)
	}
	if a := with("all"); a.StatusCode != 200 {
		t.Errorf("got %d", a.StatusCode)
	}
	refusedWith(t, with("few"), 404, "model_not_found", "model_not_found")
	refusedWith(t, with("old"), 401, "invalid_api_key", "invalid_api_key")
	refusedWith(t, with("low", "X-Penstock-Flow", "u"), 403, "flow_not_allowed", "flow_not_allowed")
	if a := with("low", "X-Penstock-Flow", "t/sub", "X-Penstock-Criticality", "critical", "X-Request-Id", "r-low"); a.StatusCode != 200 {
		t.Errorf("got %d", a.StatusCode)
	}
	workertest.WaitFor(t, func() bool { _, known := p.gateway.Explain("r-low"); return known })
	if e, _ := p.gateway.Explain("r-low"); e.Criticality != "sheddable" || e.Flow != "t/sub" || e.Token != "low" {
		t.Errorf("got %+v", e)
	}
	if a := with("slow"); a.StatusCode != 200 {
		t.Errorf("the first request of the token: got %d", a.StatusCode)
	}
	limited := with("slow")
	if limited.Header.Get("Retry-After") == "" {
		t.Error("Retry-After is missing")
	}
	refusedWith(t, limited, 429, "rate_limit_exceeded", "rate_limit_exceeded")
}

// A token may save up the requests of one second, and one request where its rate is below that.
func TestTokensSaveUpRequestsOfASecond(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate  float64
		after time.Duration // since the last of the requests that were let in at first
		first int
		then  int
	}{
		{2, 499 * time.Millisecond, 2, 0},
		{2, 500 * time.Millisecond, 2, 1},
		{2, time.Hour, 2, 2},
		{0.001, 999 * time.Second, 1, 0},
		{0.001, 1000 * time.Second, 1, 1},
		{1e-30, time.Hour, 1, 0},
	} {
		token := &caller{TokenState: TokenState{Rate: c.rate}, use: &tokenUse{}}
		letIn := func(now time.Time) (n int) {
			for token.begin(now) == nil && n < 100 {
				n++
			}
			return n
		}
		now := time.Unix(1_700_000_000, 0)
		if first, then := letIn(now), letIn(now.Add(c.after)); first != c.first || then != c.then {
			t.Errorf("%g requests a second: %d and after %s %d are let in, want %d and %d", c.rate, first, c.after, then, c.first, c.then)
		}
	}
}

// A token whose flows have used their GPU time gets the end of the period as Retry-After, and no call of it is made.
func TestABudgetThatIsSpentRefusesUntilItsPeriodEnds(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Open = false }, workertest.Says(200, "{}"))
	token := func(name string, spent int64, ends time.Duration) TokenState {
		return TokenState{
			Hash: sha256.Sum256([]byte(name)), Name: name, Flows: []string{name},
			Budget: Budget{MS: 1000, Spent: spent, Period: "hour", Ends: time.Now().Add(ends)},
		}
	}
	p.gateway.SetTokens([]TokenState{
		token("within", 999, time.Hour), token("spent", 1000, 50*time.Minute), token("over", 5000, -time.Second),
	})
	for _, name := range []string{"within", "over"} {
		if a := p.post(chat, `{"model":"m"}`, "Authorization", "Bearer "+name); a.StatusCode != 200 {
			t.Errorf("%s: got %d", name, a.StatusCode)
		}
	}
	refused := p.post(chat, `{"model":"m"}`, "Authorization", "Bearer spent")
	refusedWith(t, refused, 429, "rate_limit_exceeded", "rate_limit_exceeded")
	if s, err := strconv.Atoi(refused.Header.Get("Retry-After")); err != nil || s < 49*60 || s > 51*60 {
		t.Errorf("Retry-After is %q, and the hour ends in 50 minutes; up to one is added", refused.Header.Get("Retry-After"))
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/batches", nil)
	r.Header.Set("Authorization", "Bearer spent")
	if _, leave, err := p.gateway.Admit(r); err == nil {
		leave()
		t.Error("a mounted route takes work beyond the budget")
	}
	r.Method = http.MethodGet
	_, leave, err := p.gateway.Admit(r)
	if err != nil {
		t.Errorf("a mounted route does not answer reads: %v", err)
	}
	leave()
}

// fullQueue is a queue that takes nothing.
type fullQueue struct{ Pusher }

func (fullQueue) Push(context.Context, Durable) (id, location string, err error) {
	return "", "", fmt.Errorf("push: %w", &invalidation.FullError{RetryAfter: 40 * time.Second})
}

func TestAFullQueueSaysWhenThereWillBeRoom(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Push = fullQueue{} }, workertest.Says(200, "{}"))
	refused := p.post(chat, `{"model":"m","messages":[]}`, "Prefer", "respond-async")
	refusedWith(t, refused, 429, "queue_full", "queue_full")
	if s, err := strconv.Atoi(refused.Header.Get("Retry-After")); err != nil || s < 40 || s > 50 {
		t.Errorf("Retry-After is %q, want 40 s and up to a quarter more", refused.Header.Get("Retry-After"))
	}
}

func TestBusyInstanceIsLeftForAnother(t *testing.T) {
	t.Parallel()
	for name, busy := range map[string]http.HandlerFunc{
		"busy":        workertest.Says(503, `{"error":"The request queue is full."}`),
		"empty 503":   workertest.Says(503, ""),
		"429":         workertest.Says(429, `{"error":{"message":"overloaded"}}`),
		"first event": streamer("data: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n"),
		"first event with the end": streamer(
			"data: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\ndata: [DONE]\n\n"),
		"first event behind a comment": streamer(
			": ping\n\ndata: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n"),
		"first event behind empty lines": streamer(
			"\r\n\r\n\ndata: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n"),
		"first event behind one without data": streamer(
			"event: open\n\ndata: {\"error\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n"),
		"first event in parts behind a comment": streamer(
			": ping\n\ndata: {\"er", "ror\":{\"message\":\"The request queue is full.\",\"code\":503}}\n\n"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := make(chan struct{}, 100)
			p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
				first <- struct{}{}
				busy(w, r)
			}, workertest.Says(200, "{}"))
			for range 8 {
				answer := p.post(chat, `{"model":"m"}`)
				if got := answer.body; answer.StatusCode != 200 || got != "{}" {
					t.Fatalf("got %d %s", answer.StatusCode, got)
				}
			}
			if len(first) == 0 {
				t.Error("no call went to the busy instance")
			}
		})
	}
}

// A refusal without a body tells a client nothing. Where the second instance refuses the call as well, the client gets
// the error of a pool without room, and is told when the worker wants to be asked again.
func TestRefusalWithoutABodyIsAnErrorWithAReason(t *testing.T) {
	t.Parallel()
	full := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "40")
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	p := startTestbed(t, nil, full, full)
	answer := p.post(chat, `{"model":"m"}`)
	refusedWith(t, answer, http.StatusTooManyRequests, "overloaded", "overloaded")
	if s, err := strconv.Atoi(answer.Header.Get("Retry-After")); err != nil || s < 40 || s > 50 {
		t.Errorf("Retry-After is %q, want 40 s and up to a quarter more", answer.Header.Get("Retry-After"))
	}
}

// A worker sends comments while it computes: they show the client that its connection lives.
func TestCommentBeforeTheFirstEventPassesAtOnce(t *testing.T) {
	t.Parallel()
	for _, comment := range []string{": ping\n\n", ": ping\n\n\n"} {
		seen := make(chan struct{})
		p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
			streamer(comment)(w, r)
			select {
			case <-seen:
				streamer("data: {}\n\n")(w, r)
			case <-r.Context().Done():
			}
		})
		answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		got := make([]byte, len(comment))
		_, err = io.ReadFull(answer.Body, got)
		close(seen)
		if err != nil || string(got) != comment {
			t.Errorf("got %q (%v), want %q", got, err, comment)
		}
	}
}

func TestNoSecondAttemptWhereTheFirstMayHaveRun(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	for status, body := range map[int]string{500: `{"error":"boom"}`, 400: `{"error":"bad"}`, 504: ""} {
		count := func(w http.ResponseWriter, r *http.Request) { calls.Add(1); workertest.Says(status, body)(w, r) }
		calls.Store(0)
		p := startTestbed(t, nil, count, count)
		if a := p.post(chat, `{"model":"m"}`); a.StatusCode != status || calls.Load() != 1 {
			t.Errorf("got %d after %d calls, want %d after one", a.StatusCode, calls.Load(), status)
		}
	}
}

// A connection that closes after the request was sent does not show that nothing ran.
func TestConnectionThatClosesIsTriedAgainOnlyForIdempotentRequests(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, header string
		status       int
		calls        int32
	}{
		{"plain", "X-Nothing", 502, 1},
		{"idempotent", "Idempotency-Key", 200, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			closes := func(w http.ResponseWriter, r *http.Request) {
				if calls.Add(1) > 1 {
					workertest.Says(200, "{}")(w, r)
					return
				}
				_, _ = io.ReadAll(r.Body)
				workertest.Resets(w, r)
			}
			p := startTestbed(t, nil, closes, closes)
			if a := p.post(chat, `{"model":"m"}`, c.header, "k"); a.StatusCode != c.status || calls.Load() != c.calls {
				t.Errorf("got %d after %d calls, want %d after %d", a.StatusCode, calls.Load(), c.status, c.calls)
			}
		})
	}
}

func TestInstanceWithoutAListenerIsLeftForAnother(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, workertest.Says(200, "{}"), workertest.Says(200, "{}"))
	p.model.Instances[0].Address = "http://127.0.0.1:1"
	p.gateway.SetModels([]ModelState{p.model})
	for range 8 {
		if a := p.post(chat, `{"model":"m"}`); a.StatusCode != 200 {
			t.Fatalf("got %d %s", a.StatusCode, a.body)
		}
	}
}

// Bodies take memory whether their requests wait or are in flight.
func TestBodiesOfAllRequestsAreBounded(t *testing.T) {
	t.Parallel()
	body := `{"model":"m","messages":"` + strings.Repeat("x", 100<<10) + `"}`
	for _, length := range []string{"known", "unknown"} {
		t.Run(length, func(t *testing.T) {
			t.Parallel()
			began, release := make(chan struct{}, 8), make(chan struct{})
			end := sync.OnceFunc(func() { close(release) })
			p := startTestbed(t, func(c *Config, _ *ModelState) { c.BodiesMax = 250 << 10 }, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.ReadAll(r.Body)
				began <- struct{}{}
				<-release
				workertest.Says(200, "{}")(w, r)
			})
			t.Cleanup(end)
			ask := func() *http.Request {
				r := p.request(t.Context(), http.MethodPost, chat, body)
				if length == "unknown" {
					r.ContentLength = -1
				}
				return r
			}
			var group sync.WaitGroup
			for range 2 {
				group.Go(func() {
					if a := p.send(ask()); a.StatusCode != 200 {
						t.Errorf("got %d %s", a.StatusCode, a.body)
					}
				})
			}
			workertest.WaitFor(t, func() bool { return len(began) == 2 })
			third := p.send(ask())
			refusedWith(t, third, 429, "overloaded", "overloaded")
			end()
			group.Wait()
			free := func() bool { return p.gateway.bodies.taken.Load() == 0 } // a moment after the answer
			workertest.WaitFor(t, free)
			if a := p.send(ask()); a.StatusCode != 200 {
				t.Errorf("after the others: %d %s", a.StatusCode, a.body)
			}
			workertest.WaitFor(t, free)
		})
	}
}

func TestStreamThatBreaksEndsWithAnErrorAndWithoutDone(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		streamer("data: {\"choices\":[]}\n\n", "data: {\"choi")(w, r)
		panic(http.ErrAbortHandler)
	})
	got := p.post(chat, `{"model":"m","stream":true,"stream_options":{}}`).body
	if !strings.HasPrefix(got, "data: {\"choices\":[]}\n\n") || !strings.Contains(got, `"code":"upstream_error"`) ||
		strings.Contains(got, "[DONE]") {
		t.Errorf("got %q", got)
	}
}

// Anthropic's clients heed named events alone, and take a stream that ends otherwise for whole.
func TestStreamOfMessagesThatBreaksEndsWithItsErrorEvent(t *testing.T) {
	t.Parallel()
	const begin = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n"
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		streamer(begin, "event: content_block_delta\nda")(w, r)
		panic(http.ErrAbortHandler)
	})
	got := p.post("/v1/messages", `{"model":"m","stream":true}`).body
	last, found := strings.CutPrefix(got, begin+"event: content_block_delta\nda\n\nevent: error\ndata: ")
	var event struct {
		Type  string
		Error struct{ Type, Message string }
	}
	if err := json.Unmarshal([]byte(last), &event); !found || err != nil || !strings.HasSuffix(last, "\n\n") ||
		event.Type != "error" || event.Error.Type != "api_error" || event.Error.Message == "" {
		t.Errorf("got %q: %v", got, err)
	}
}

func TestWholeAnswerThatBreaksIsNotTakenForWhole(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, workertest.ResetsMidBody)
	answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m"}`))
	if err == nil {
		defer answer.Body.Close()
		if body, err := io.ReadAll(answer.Body); err == nil {
			t.Errorf("got %q without an error", body)
		}
	}
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
}

func TestClientThatLeavesEndsTheCall(t *testing.T) {
	t.Parallel()
	p, leave := leaving(t)
	leave()
	workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 4 })
}

// In the median: a single call is late where the machine is.
func TestTimedCallsEndWithinTenMillisecondsOfTheirClient(t *testing.T) {
	p, leave := leaving(t)
	took := make([]time.Duration, 41)
	for i := range took {
		took[i] = leave()
		workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
	}
	slices.Sort(took)
	t.Logf("from the cancel of a client to the end of its call at the worker: p50 %s, longest %s", took[len(took)/2], took[len(took)-1])
	if median := took[len(took)/2]; median > 10*time.Millisecond {
		t.Errorf("calls end %s after their clients", median)
	}
}

// leaving starts a testbed whose worker answers nothing. leave sends a request, cancels it when the worker has it, and
// returns how long after the cancel the call has ended at the worker.
func leaving(t *testing.T) (p *testbed, leave func() time.Duration) {
	t.Helper()
	begun, ended := make(chan struct{}), make(chan time.Time)
	p = startTestbed(t, nil, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		begun <- struct{}{}
		<-r.Context().Done()
		ended <- time.Now()
	})
	return p, func() time.Duration {
		ctx, cancel := context.WithCancel(t.Context())
		request := p.request(ctx, http.MethodPost, chat, `{"model":"m"}`)
		go func() {
			answer, err := http.DefaultClient.Do(request)
			if err == nil {
				answer.Body.Close()
			}
		}()
		<-begun
		left := time.Now()
		cancel()
		return (<-ended).Sub(left)
	}
}

// unreachable is a transport that connects to no worker until the call is given up.
type unreachable struct{}

func (unreachable) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// A slot is in doubt where its call was sent and may run on, and there alone.
func TestSlotsAreInDoubtWhereTheCallWasSent(t *testing.T) {
	t.Parallel()
	const notSent = "not sent" // before the deadline
	const envoy = "upstream connect error or disconnect/reset before headers. reset reason: "
	for name, c := range map[string]struct {
		change func(*testbed)
		worker http.HandlerFunc
		held   int
	}{
		notSent: {func(p *testbed) { p.gateway.transport = unreachable{} }, nil, 4},
		"broken before the head": {nil, func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			panic(http.ErrAbortHandler)
		}, 3},
		"broken in mid-answer": {nil, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			streamer("data: {}\n\n")(w, r)
			panic(http.ErrAbortHandler)
		}, 3},
		"whole":                    {nil, streamer("data: {}\n\n"), 4},
		"proxy without the worker": {nil, workertest.Says(502, "bad gateway"), 3},
		"proxy that waits no more": {nil, workertest.Says(504, "timeout"), 3},
		"proxy of Cloudflare":      {nil, workertest.Says(524, ""), 3},
		"proxy of Envoy":           {nil, workertest.Says(503, envoy+"connection termination"), 3},
		"proxy that sent nothing":  {nil, workertest.Says(503, envoy+"overflow"), 4},
		"error of the worker":      {nil, workertest.Says(500, "{}"), 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startTestbed(t, func(_ *Config, m *ModelState) { m.AbortStops = new(false) }, c.worker)
			if c.change != nil {
				c.change(p)
			}
			deadline := "60000"
			if name == notSent {
				deadline = "500"
			}
			p.post(chat, `{"model":"m","stream":true}`, "X-Penstock-Deadline-Ms", deadline, "X-Request-Id", "r")
			workertest.WaitFor(t, func() bool { _, known := p.gateway.Explain("r"); return known })
			if s := p.state(); s.Held != c.held || s.InFlight != 0 {
				t.Errorf("%d slots are held and %d calls in flight, want %d and none", s.Held, s.InFlight, c.held)
			}
		})
	}
}

// A worker that answers that its run goes on has no answer for a client that waits. The slot is in doubt: it is busy until
// the run has ended. Other answers pass as they are, whatever their length and type.
func TestRunThatGoesOnBehindItsAnswerKeepsItsSlot(t *testing.T) {
	t.Parallel()
	words := worker.Statuses{Success: []string{"success"}, Failed: []string{"failed"}, Cancelled: []string{"cancelled"}}
	long := `{"status":"processing","text":"` + strings.Repeat("x", 2*refusalMax) + `"}`
	for name, c := range map[string]struct {
		protocol     worker.Protocol
		status       int
		kind, answer string
		goesOn       bool
	}{
		"processing":           {worker.ProtocolGeneric, 200, "application/json", `{"status":"processing","job_id":"7"}`, true},
		"without a type":       {worker.ProtocolGeneric, 202, "text/plain", ` {"status":"queued"}`, true},
		"success":              {worker.ProtocolGeneric, 200, "application/json", `{"status":"success","result":1}`, false},
		"failed":               {worker.ProtocolGeneric, 200, "application/json", `{"status":"FAILED","error":"x"}`, false},
		"without a status":     {worker.ProtocolGeneric, 200, "application/json", `{"label":"cat"}`, false},
		"status of other type": {worker.ProtocolGeneric, 200, "application/json", `{"status":200}`, false},
		"not JSON":             {worker.ProtocolGeneric, 200, "text/plain", `status: processing`, false},
		"cut":                  {worker.ProtocolGeneric, 200, "application/json", `{"status":"processing"`, false},
		"long":                 {worker.ProtocolGeneric, 200, "application/json", long, false},
		"refused":              {worker.ProtocolGeneric, 422, "application/json", `{"status":"processing"}`, false},
		"cog accepted":         {worker.ProtocolCog, 202, "application/json", `{"status":"starting"}`, true},
		"303 of Modal":         {worker.ProtocolGeneric, 303, "text/plain", ``, true},
		"303 of OpenAI's API":  {worker.ProtocolOpenAI, 303, "text/plain", ``, true},
		"cog done":             {worker.ProtocolCog, 200, "application/json", `{"status":"processing"}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, body := "/models/m/call", `{"x":1}`
			if c.protocol == worker.ProtocolOpenAI {
				path, body = chat, `{"model":"m"}`
			}
			for _, chunked := range []bool{false, true} {
				p := startTestbed(t, func(_ *Config, m *ModelState) { m.Protocol, m.Statuses = c.protocol, words },
					func(w http.ResponseWriter, r *http.Request) {
						_, _ = io.Copy(io.Discard, r.Body)
						w.Header().Set("Content-Type", c.kind)
						w.WriteHeader(c.status)
						for _, piece := range []string{c.answer[:len(c.answer)/2], c.answer[len(c.answer)/2:]} {
							_, _ = io.WriteString(w, piece)
							if chunked {
								_ = http.NewResponseController(w).Flush()
							}
						}
					})
				a := p.post(path, body, "X-Request-Id", "r")
				held := 4
				if c.goesOn {
					held = 3
					refusedWith(t, a, 502, "upstream_error", "upstream_error")
				} else if a.StatusCode != c.status || a.body != c.answer {
					t.Errorf("got %d %.80q, want the answer of the worker", a.StatusCode, a.body)
				}
				workertest.WaitFor(t, func() bool { _, known := p.gateway.Explain("r"); return known })
				if s := p.state(); s.Held != held || s.InFlight != 0 {
					t.Errorf("%d slots are held and %d calls in flight, want %d and none", s.Held, s.InFlight, held)
				}
			}
		})
	}
}

func TestDeadlineEndsTheCall(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	refusedWith(t, p.post(chat, `{"model":"m"}`, "X-Penstock-Deadline-Ms", "60"), 504, "deadline_exceeded", "deadline_exceeded")
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
}

// A client that stops reading is cut, so that it does not keep its slot.
func TestClientThatDoesNotReadIsCut(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	p := startTestbed(t, func(_ *Config, m *ModelState) { m.Policy.ClientStall = worker.Seconds(200 * time.Millisecond) },
		func(w http.ResponseWriter, r *http.Request) {
			defer close(ended)
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			for r.Context().Err() == nil {
				if _, err := w.Write(bytes.Repeat([]byte("x"), 64<<10)); err != nil {
					return
				}
			}
		})
	answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() // it is not read
	<-ended
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
}

func TestSilentWorkerIsGivenUp(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.FirstByteMax = worker.Seconds(100 * time.Millisecond)
	}, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	refusedWith(t, p.post(chat, `{"model":"m"}`), 502, "upstream_error", "upstream_error")
	p = startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.SilenceMax = worker.Seconds(100 * time.Millisecond)
	}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		streamer("data: {}\n\n")(w, r)
		<-r.Context().Done()
	})
	// Where the gateway itself is slow, the limit ends the stream before it has read the event.
	answer := p.post(chat, `{"model":"m","stream":true}`)
	if answer.StatusCode != http.StatusBadGateway && !strings.Contains(answer.body, errSilence.Error()) {
		t.Errorf("got %d %q", answer.StatusCode, answer.body)
	}
}

// A worker that sends the head of a stream and no event holds its slot for the limit of silence at most.
func TestWorkerThatSendsNoFirstEventIsGivenUp(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.SilenceMax = worker.Seconds(100 * time.Millisecond)
	}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		streamer("")(w, r)
		<-r.Context().Done()
	})
	answer := p.post(chat, `{"model":"m","stream":true}`)
	if answer.StatusCode == http.StatusOK && !strings.Contains(answer.body, errSilence.Error()) {
		t.Errorf("got %d %q", answer.StatusCode, answer.body)
	}
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
}

// RFC 9110, section 7.6.1.
func TestHeadersOfTheConnectionStayBehind(t *testing.T) {
	t.Parallel()
	seen := make(chan http.Header, 1)
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Clone()
		workertest.Says(200, "{}")(w, r)
	})
	p.post(chat, `{"model":"m"}`, "Connection", "x-hop, X-Other", "X-Hop", "1", "X-Other", "2", "X-End", "3",
		"Expect", "100-continue")
	if got := <-seen; got.Get("X-Hop") != "" || got.Get("X-Other") != "" || got.Get("Expect") != "" ||
		got.Get("X-End") != "3" {
		t.Errorf("the worker got %v", got)
	}
}

// The same of an answer.
func TestHeadersOfTheWorkersConnectionStayBehind(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "x-hop, X-Other")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("X-Other", "2")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("X-End", "3")
		_, _ = io.WriteString(w, "{}")
	})
	h := p.post(chat, `{"model":"m"}`).Header
	if h.Get("X-Hop") != "" || h.Get("X-Other") != "" || h.Get("Keep-Alive") != "" || h.Get("X-End") != "3" {
		t.Errorf("the client got %v", h)
	}
}

// A client cannot name the entry, the fencing token or the callback of a durable run, nor the source of a call.
func TestHeadersOfRunsAreNotTheClients(t *testing.T) {
	t.Parallel()
	seen := make(chan http.Header, 1)
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Clone()
		workertest.Says(200, "{}")(w, r)
	})
	p.post(chat, `{"model":"m"}`, "penstock-entry", "17", "Penstock-Token", "18446744073709551615", "Penstock-Attempt", "1",
		"Penstock-Callback", "http://169.254.169.254/", "Penstock-Remaining-Ms", "1", "X-Source", "dispatcher")
	for name := range <-seen {
		if worker.OwnHeader(name) {
			t.Errorf("the worker got %s", name)
		}
	}
}

// Texts of workers, as transcriptions, may have any counts in them: only JSON and events report tokens.
func TestTextReportsNoTokens(t *testing.T) {
	t.Parallel()
	for kind, want := range map[string]int64{
		"text/plain": 0, "": 0, "application/json; charset=utf-8": 3, "Application/Problem+JSON": 3, "text/event-stream": 3,
	} {
		p := startTestbed(t, nil, func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = []string{kind}
			_, _ = io.WriteString(w, `data: {"usage":{"prompt_tokens":3}}`+"\n\n")
		})
		p.post(chat, `{"model":"m"}`, "X-Request-Id", "r")
		workertest.WaitFor(t, func() bool { _, known := p.gateway.Explain("r"); return known })
		if e, _ := p.gateway.Explain("r"); e.In != want {
			t.Errorf("%q: %d tokens are counted, want %d", kind, e.In, want)
		}
	}
}

// queueOf keeps what is pushed.
type queueOf struct {
	Pusher
	pushed chan Durable
}

func (q queueOf) Push(_ context.Context, d Durable) (id, location string, err error) {
	d.Body = bytes.Clone(d.Body)
	q.pushed <- d
	return "7", "/v1/entries/7", nil
}

// The slot of a live call of an asynchronous model would be free while its run goes on: the model is called by entries.
func TestAnAsynchronousModelIsCalledByEntriesAlone(t *testing.T) {
	t.Parallel()
	q := queueOf{pushed: make(chan Durable, 1)}
	p := startTestbed(t, func(c *Config, m *ModelState) {
		c.Push, m.Protocol, m.Async = q, worker.ProtocolGeneric, true
	}, func(w http.ResponseWriter, _ *http.Request) {
		t.Error("the worker is called")
		workertest.Says(200, `{"status":"processing","job_id":"j1"}`)(w, nil)
	})
	refusedWith(t, p.post("/models/m/call", `{"x":1}`), 400, "async_only", "async_only")
	if a := p.post("/models/m/call", `{"x":1}`, "Prefer", "respond-async"); a.StatusCode != http.StatusAccepted {
		t.Errorf("got %d %s", a.StatusCode, a.body)
	}
	if d := <-q.pushed; string(d.Body) != `{"x":1}` {
		t.Errorf("pushed %s", d.Body)
	}
}

// Workers of the generic protocol take calls without their source for those of other clients.
func TestCallsOfTheGenericProtocolNameTheirSource(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	p := startTestbed(t, func(_ *Config, m *ModelState) { m.Protocol = worker.ProtocolGeneric }, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Get("X-Source")
		workertest.Says(200, `{"status":"success","result":1}`)(w, r)
	})
	p.post("/models/m/call", `{"x":1}`)
	if source := <-seen; source != "dispatcher" {
		t.Errorf("the source is %q", source)
	}
}

func TestFullPoolRefusesAndTellsWhen(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.Total, m.Policy.QueueTTL = 2, worker.Seconds(time.Hour)
		m.Instances[0].Slots = 1
	}, held(release))
	end := sync.OnceFunc(func() { close(release) })
	t.Cleanup(end)
	answers := make(chan reply, 3)
	for range 3 {
		go func() { answers <- p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "a") }()
	}
	workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 1 && s.Waiting["default"] == 2 })
	full := p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "a")
	if full.Header.Get("Retry-After") == "" {
		t.Error("Retry-After is missing")
	}
	refusedWith(t, full, 429, "overloaded", "overloaded")
	end()
	for range 3 {
		if a := <-answers; a.StatusCode != 200 {
			t.Errorf("got %d", a.StatusCode)
		}
	}
	p.gateway.Drain()
	refusedWith(t, p.post(chat, `{"model":"m"}`), 503, "shutting_down", "shutting_down")
}

// held answers calls once release is closed.
func held(release <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-release
		_, _ = io.WriteString(w, "{}")
	}
}

func TestWaitForASlotEnds(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Policy.QueueTTL = worker.Seconds(100 * time.Millisecond)
		m.Instances[0].Slots = 1
	}, held(release))
	end := sync.OnceFunc(func() { close(release) })
	t.Cleanup(end)
	first := make(chan reply, 1)
	go func() { first <- p.post(chat, `{"model":"m"}`) }()
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 1 })
	refusedWith(t, p.post(chat, `{"model":"m"}`), 429, "queue_timeout", "queue_timeout")
	end()
	if a := <-first; a.StatusCode != 200 {
		t.Errorf("got %d", a.StatusCode)
	}
}

type pushes struct {
	mu   sync.Mutex
	list []Durable
	err  error

	outcome DurableOutcome
	ended   bool
}

func (p *pushes) Await(context.Context, string, string) (DurableOutcome, bool, error) {
	return p.outcome, p.ended, nil
}

func (*pushes) AcceptedBefore(context.Context, Durable) (bool, error) { return false, nil }

func (p *pushes) Push(_ context.Context, d Durable) (id, location string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d.Body = bytes.Clone(d.Body)
	p.list = append(p.list, d)
	return "17", "/v1/entries/17", p.err
}

func TestRespondAsyncMakesADurableEntry(t *testing.T) {
	t.Parallel()
	queue := &pushes{}
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Push = queue }, workertest.Says(200, "{}"))
	body := `{"model":"m","messages":[]}`
	answer := p.post(chat, body, "Prefer", "respond-async", "X-Penstock-Criticality", "sheddable", "X-Penstock-Flow", "t")
	if answer.StatusCode != 202 || answer.Header.Get("Location") != "/v1/entries/17" {
		t.Errorf("got %d %v", answer.StatusCode, answer.Header)
	}
	if d := queue.list[0]; d.Model != "m" || d.Flow != "t" || d.Criticality != Sheddable {
		t.Errorf("pushed %+v", d)
	}
	// The path decides which operation runs, and no member of the body.
	p.post(chat, `{"model":"m","operation":"embeddings"}`, "Prefer", "respond-async")
	for _, d := range queue.list {
		var payload struct{ Operation string }
		if err := json.Unmarshal(d.Body, &payload); err != nil || payload.Operation != worker.OperationChat {
			t.Errorf("a request to %s became an entry for %q: %s", chat, payload.Operation, d.Body)
		}
	}
	queue.err = errors.New("the database is away")
	refusedWith(t, p.post(chat, body, "Prefer", "respond-async"), 503, "async_unavailable", "async_unavailable")
}

func TestOnFullPushesForThoseWhoAgree(t *testing.T) {
	t.Parallel()
	queue := &pushes{}
	p := startTestbed(t, func(c *Config, m *ModelState) {
		c.Push, m.Policy.OnFull, m.Instances[0].Usable = queue, OnFullPush, false
	}, workertest.Says(200, "{}"))
	if a := p.post(chat, `{"model":"m"}`, "Prefer", "respond-async, wait=5"); a.StatusCode != 202 {
		t.Errorf("got %d", a.StatusCode)
	}
	refusedWith(t, p.post(chat, `{"model":"m"}`), 503, "no_endpoints", "no_endpoints")
	queue.outcome, queue.ended = DurableOutcome{Outcome: "done", Result: []byte(`{"n":1}`)}, true
	if a := p.post(chat, `{"model":"m"}`, "Prefer", "respond-async, wait=5"); a.StatusCode != 200 || a.body != `{"n":1}` {
		t.Errorf("got %d %s", a.StatusCode, a.body)
	}
	if a := p.post(chat, `{"model":"m","stream":true}`, "Prefer", "respond-async, wait=5"); a.StatusCode != 202 {
		t.Errorf("a stream: got %d", a.StatusCode)
	}
	queue.outcome = DurableOutcome{Outcome: "expired"}
	refusedWith(t, p.post(chat, `{"model":"m"}`, "Prefer", "respond-async, wait=5"), 504, "deadline_exceeded", "deadline_exceeded")
}

func TestModelsAreThoseOfTheCaller(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, workertest.Says(200, "{}"))
	for path, want := range map[string]string{
		"/v1/models": `{"object":"list","data":[{"id":"lora-1","object":"model","created":0,"owned_by":"penstock"},` +
			`{"id":"m","object":"model","created":0,"owned_by":"penstock"}]}`,
		"/v1/models/m": `{"id":"m","object":"model","created":0,"owned_by":"penstock"}`,
	} {
		if got := strings.TrimSpace(p.send(p.request(t.Context(), http.MethodGet, path, "")).body); got != want {
			t.Errorf("%s: got %s", path, got)
		}
	}
}

func TestFlowIsTextAndWithinTheToken(t *testing.T) {
	named := func(name string, flows ...string) *serving {
		return &serving{caller: &caller{TokenState: TokenState{Name: name, Flows: flows}}}
	}
	for _, c := range []struct {
		s                    *serving
		asked, want, granted string
		status               int
	}{
		{&serving{}, "any", "any", "any", 0},
		{&serving{}, "\xff", "", "", http.StatusBadRequest},
		{named("ci"), "", "ci", "ci", 0},
		{named("ci"), "ci/nightly", "ci/nightly", "ci", 0},
		{named("ci"), "other", "", "", http.StatusForbidden},
		{named("ci", "a", "b"), "", "a", "a", 0},
		{named("ci", "a", "b"), "b/1", "b/1", "b", 0},
		{named("ci", "a", "a/b"), "a/b/1", "a/b/1", "a/b", 0},
		{named("ci", "a", "b"), "ci", "", "", http.StatusForbidden},
		{named("ci", "own"), "own/\xff", "", "", http.StatusBadRequest},
	} {
		got, granted, err := c.s.flow(c.asked)
		var refused *badRequest
		if got != c.want || granted != c.granted || errors.As(err, &refused) != (c.status != 0) || refused != nil && refused.status != c.status {
			t.Errorf("flow %q: %q, %v; want %q and status %d", c.asked, got, err, c.want, c.status)
		}
	}
}

// Names below a flow of a token have no share of a pool of their own, unless an operator gave them one: a client thinks
// of as many as it likes. Usage has the whole name, and a pause of it holds.
func TestNamesBelowAFlowTakeItsShare(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := startTestbed(t, func(c *Config, m *ModelState) {
		c.Open, m.Instances[0].Slots, m.Policy.FlowTotal, m.Policy.QueueTTL = false, 1, 1, worker.Seconds(time.Hour)
	}, held(release))
	p.gateway.SetTokens([]TokenState{{Hash: sha256.Sum256([]byte("key")), Name: "acme"}})
	flows := map[string]FlowState{"acme/paid": {Weight: 2}}
	p.gateway.SetFlows(flows)
	ctx, leave := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	t.Cleanup(func() {
		leave()
		close(release)
		group.Wait()
	})
	of := func(flow string) []string {
		return []string{"Authorization", "Bearer key", "X-Penstock-Flow", flow, "X-Request-Id", flow}
	}
	p.occupy(ctx, &group, `{"model":"m"}`, of("acme/1")...)
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 1 })
	p.occupy(ctx, &group, `{"model":"m"}`, of("acme/2")...)
	workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 1 })
	const ttl = "X-Penstock-Queue-Ttl-Ms"
	same := p.post(chat, `{"model":"m"}`, append(of("acme/3"), ttl, "50")...)
	refusedWith(t, same, 429, "flow_queue_full", "flow_queue_full")
	own := p.post(chat, `{"model":"m"}`, append(of("acme/paid/x"), ttl, "50")...)
	refusedWith(t, own, 429, "queue_timeout", "queue_timeout")
	paused := maps.Clone(flows)
	paused["acme/2"] = FlowState{Paused: PauseState{Reason: "test"}}
	p.gateway.SetFlows(paused)
	workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 0 })
	workertest.WaitFor(t, func() bool { _, over := p.gateway.Explain("acme/2"); return over })
	if e, _ := p.gateway.Explain("acme/2"); e.Flow != "acme/2" {
		t.Errorf("the request is booked to %q", e.Flow)
	}
}

// A client chooses neither the id of a prediction, which may be that of an entry, nor where its worker reports.
func TestCallsOfCogDoNotNameTheirRun(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(_ *Config, m *ModelState) { m.Protocol = worker.ProtocolCog }, workertest.Says(200, "{}"))
	const call = "/models/m/call"
	for _, body := range []string{
		`{"id":"17","input":{}}`, `{"webhook":"http://10.0.0.1/"}`, `{"input":{},"webhook_events_filter":["completed"]}`,
		`{"output_file_prefix":"http://10.0.0.1/"}`, `{"\u0069d":"17"}`, `{"Webhook":"http://10.0.0.1/"}`, `{"id":null}`,
	} {
		refusedWith(t, p.post(call, body), 400, "invalid_prediction", "invalid_prediction")
	}
	for _, body := range []string{`{"input":{"x":NaN},"id":"17"}`, `[]`, `{} {}`, "\xef\xbb\xbf{}"} {
		refusedWith(t, p.post(call, body), 400, "invalid_json", "invalid_json")
	}
	for _, body := range []string{`{"input":{"id":"17","webhook":"x"},"context":{}}`, `{}`, ``} {
		if a := p.post(call, body); a.StatusCode != 200 {
			t.Errorf("%s: got %d %s", body, a.StatusCode, a.body)
		}
	}
}
