package worker

import (
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestDispatcherPollContract(t *testing.T) {
	model := Model{
		Name: "flux", Protocol: ProtocolGeneric, Type: TypeAsync, PollPath: "/status/{id}",
	}
	run := RunRef{Entry: "entry-17", Token: 42, Attempt: 1, Remote: "a/b?c"}
	for _, c := range []contract{
		{"running", workertest.Says(200, `{"status":"processing"}`), want{kind: Accepted, remote: "a/b?c"}},
		{"word of its own", workertest.Says(200, `{"status":"denoising"}`), want{kind: Accepted, remote: "a/b?c"}},
		{"loading", workertest.Says(200, `{"status":"loading"}`), want{kind: Accepted, remote: "a/b?c", starting: true}},
		{"success", workertest.Says(200, `{"status":"success","result":1}`), want{kind: Done, result: `1`}},
		{"completed", workertest.Says(200, `{"status":"completed","result":{"a":1}}`), want{kind: Done, result: `{"a":1}`}},
		{"DONE", workertest.Says(200, `{"status":"DONE","result":[]}`), want{kind: Done, result: `[]`}},
		{"failed", workertest.Says(200, `{"status":"failed","error":"device lost"}`), want{kind: Failed, class: ClassContextLost}},
		{"error", workertest.Says(200, `{"status":"error","error":{"message":"x"}}`), want{kind: Failed, class: ClassTransient}},
		{"failed in the words of a full server", workertest.Says(200, `{"status":"failed","error":"upstream: rate limit exceeded"}`), want{kind: Failed, class: ClassTransient}},
		{"failed, and called busy", workertest.Says(200, `{"status":"failed","error":"x","error_class":"busy"}`), want{kind: Failed, class: ClassTransient}},
		{"cancelled", workertest.Says(200, `{"status":"cancelled"}`), want{kind: Cancelled}},
		{"unknown job", workertest.Says(404, `{"detail":"not found"}`), want{kind: Unknown}},
		{"busy", workertest.Says(503, ``, "Retry-After", "2"), want{kind: NotReady, running: true, retryAfter: 2 * time.Second}},
		{"500", workertest.Says(500, `boom`), want{kind: NotReady, running: true}},
		{"bad JSON", workertest.Says(200, `<html>`), want{kind: NotReady, running: true}},
		{"reset", workertest.Resets, want{kind: NotReady, running: true}},
		{"hangs", workertest.Hangs, want{kind: NotReady, running: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			model := model
			model.Timeouts.Control = c.limit()
			s := workertest.NewScript(t, c.answer)
			c.want.check(t, newAdapter(t, model, s.URL+"/generate", 1).Poll(t.Context(), run))
			for _, r := range s.Requests() { // a GET may be repeated by net/http
				if r.Method != http.MethodGet || r.Path != "/status/a%2Fb%3Fc" || r.Header.Get("Penstock-Token") != "42" {
					t.Errorf("worker was asked %s %s, token %q", r.Method, r.Path, r.Header.Get("Penstock-Token"))
				}
			}
		})
	}
}

func TestCogPollReadsHealthOnly(t *testing.T) {
	run := RunRef{Entry: "e", Remote: "e"}
	for _, c := range []struct {
		name   string
		slots  int
		answer http.HandlerFunc
		want   want
	}{
		{"busy", 1, workertest.Says(200, `{"status":"BUSY"}`), want{kind: Accepted, remote: "e"}},
		{"ready, one slot", 1, workertest.Says(200, `{"status":"READY"}`), want{kind: Unknown}},
		{"ready, several slots, no count", 4, workertest.Says(200, `{"status":"READY"}`), want{kind: Accepted, remote: "e"}},
		{"ready, several slots, none used", 4, workertest.Says(200, `{"status":"READY","concurrency":{"max":4,"current":0}}`), want{kind: Unknown}},
		{"ready, several slots, some used", 4, workertest.Says(200, `{"status":"READY","concurrency":{"max":4,"current":1}}`), want{kind: Accepted, remote: "e"}},
		{"restarted", 1, workertest.Says(200, `{"status":"STARTING"}`), want{kind: Unknown}},
		{"defunct", 1, workertest.Says(200, `{"status":"DEFUNCT"}`), want{kind: Unknown}},
		{"unhealthy", 1, workertest.Says(200, `{"status":"UNHEALTHY"}`), want{kind: NotReady, running: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, c.answer)
			c.want.check(t, newAdapter(t, Model{Name: "m", Protocol: ProtocolCog}, s.URL, c.slots).Poll(t.Context(), run))
			for _, r := range s.Requests() {
				if r.Method != http.MethodGet || r.Path != "/health-check" {
					t.Errorf("polling made %s %s: a repeated PUT may run the prediction again", r.Method, r.Path)
				}
			}
		})
	}
}

func TestSynchronousProtocolsCannotBePolled(t *testing.T) {
	for _, c := range allProtocols() {
		if c.model.Protocol == ProtocolCog {
			continue
		}
		s := workertest.NewScript(t, workertest.Says(200, `{}`))
		want{kind: Unknown, running: true}.check(t, newAdapter(t, c.model, s.URL, 1).Poll(t.Context(), RunRef{Remote: "x"}))
		if len(s.Requests()) != 0 {
			t.Errorf("%s was asked something", c.model.Protocol)
		}
	}
}

func TestCancelContract(t *testing.T) {
	dispatch := Model{Name: "m", Protocol: ProtocolGeneric, CancelPath: "/cancel/{id}"}
	prediction := Model{Name: "m", Protocol: ProtocolCog}
	for _, c := range []struct {
		name                 string
		model                Model
		answer               http.HandlerFunc
		path                 string
		delivered, confirmed bool
	}{
		{"dispatcher confirms", dispatch, workertest.Says(200, `{"status":"cancelled"}`), "/cancel/r%2F1", true, true},
		{"dispatcher confirms by flag", dispatch, workertest.Says(200, `{"cancelled":true}`), "/cancel/r%2F1", true, true},
		{"dispatcher takes note", dispatch, workertest.Says(202, `{}`), "/cancel/r%2F1", true, false},
		{"dispatcher does not know", dispatch, workertest.Says(404, `{}`), "/cancel/r%2F1", false, false},
		{"dispatcher resets", dispatch, workertest.Resets, "/cancel/r%2F1", false, false},
		{"dispatcher without a path", Model{Name: "m", Protocol: ProtocolGeneric}, workertest.Says(200, `{}`), "", false, false},
		{"cog takes note", prediction, workertest.Says(200, `{}`), "/predictions/r%2F1/cancel", true, false},
		{"cog does not know", prediction, workertest.Says(404, `{}`), "/predictions/r%2F1/cancel", false, false},
		{"cog resets", prediction, workertest.Resets, "/predictions/r%2F1/cancel", false, false},
		{"oip cannot", Model{Name: "m", Protocol: ProtocolOIP}, workertest.Says(200, `{}`), "", false, false},
		{"openai closes instead", Model{Name: "m", Protocol: ProtocolOpenAI}, workertest.Says(200, `{}`), "", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, c.answer)
			got := newAdapter(t, c.model, s.URL+"", 1).Cancel(t.Context(), RunRef{Entry: "e", Token: 7, Remote: "r/1"})
			if got.Delivered != c.delivered || got.Confirmed != c.confirmed || (!got.Confirmed && got.Reason == "") {
				t.Errorf("got %+v", got)
			}
			if c.path == "" {
				if n := len(s.Requests()); n != 0 {
					t.Errorf("worker saw %d requests, want none", n)
				}
				return
			}
			if r := s.Requests()[0]; r.Method != http.MethodPost || r.Path != c.path || r.Header.Get("Penstock-Token") != "7" {
				t.Errorf("worker was sent %s %s", r.Method, r.Path)
			}
		})
	}
}

func TestProbeContract(t *testing.T) {
	routes := func(answers map[string]http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if answer := answers[r.URL.Path]; answer != nil {
				answer(w, r)
				return
			}
			workertest.Says(404, `{}`)(w, r)
		}
	}
	type figures struct{ active, capacity, queued int }
	none := figures{-1, -1, -1}
	dispatch, pred := Model{Name: "m", Protocol: ProtocolGeneric}, Model{Name: "m", Protocol: ProtocolCog}
	infer, chat := Model{Name: "m", Protocol: ProtocolOIP}, Model{Name: "m", Protocol: ProtocolOpenAI}
	loaded := chat
	loaded.LoadPath = "/metrics"
	slotted := chat
	slotted.LoadPath = "/slots"
	for _, c := range []struct {
		name    string
		model   Model
		answers map[string]http.HandlerFunc
		state   HealthState
		figures figures
	}{
		{"seed worker", dispatch, map[string]http.HandlerFunc{"/health": workertest.Says(200, `{"active_jobs":2}`)}, StateReady, figures{2, -1, -1}},
		{"own worker, full", dispatch, map[string]http.HandlerFunc{"/health": workertest.Says(200, `{"active_jobs":2,"max_concurrent":2,"queued":1}`)}, StateBusy, figures{2, 2, 1}},
		{"own worker, loading", dispatch, map[string]http.HandlerFunc{"/health": workertest.Says(503, `{"detail":"loading weights"}`)}, StateStarting, none},
		{"own worker, ill", dispatch, map[string]http.HandlerFunc{"/health": workertest.Says(500, `x`)}, StateUnhealthy, none},
		{"nonsense figures", dispatch, map[string]http.HandlerFunc{"/health": workertest.Says(200, `{"active_jobs":-3}`)}, StateReady, none},
		{"resets", dispatch, map[string]http.HandlerFunc{"/health": workertest.Resets}, StateUnhealthy, none},
		{"cog ready", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"READY","setup":{"status":"succeeded"}}`)}, StateReady, none},
		{"cog busy with count", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"BUSY","concurrency":{"max":2,"current":2}}`)}, StateBusy, figures{2, 2, -1}},
		{"cog starting", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"STARTING"}`)}, StateStarting, none},
		{"cog unknown", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"UNKNOWN"}`)}, StateStarting, none},
		{"cog setup failed", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"SETUP_FAILED"}`)}, StateDefunct, none},
		{"cog unhealthy", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `{"status":"UNHEALTHY","user_healthcheck_error":"x"}`)}, StateUnhealthy, none},
		{"cog bad JSON", pred, map[string]http.HandlerFunc{"/health-check": workertest.Says(200, `<`)}, StateUnhealthy, none},
		{"triton ready", infer, map[string]http.HandlerFunc{"/v2/models/m/ready": workertest.Says(200, ``)}, StateReady, none},
		{"triton model not ready", infer, map[string]http.HandlerFunc{"/v2/models/m/ready": workertest.Says(400, ``), "/v2/health/live": workertest.Says(200, ``)}, StateStarting, none},
		{"no model route", infer, map[string]http.HandlerFunc{"/v2/health/ready": workertest.Says(200, `{"ready":false}`)}, StateReady, none},
		{"not live", infer, map[string]http.HandlerFunc{"/v2/models/m/ready": workertest.Says(400, ``), "/v2/health/live": workertest.Says(400, ``)}, StateUnhealthy, none},
		{"vllm", loaded, map[string]http.HandlerFunc{"/health": workertest.Says(200, ``), "/metrics": workertest.Says(200, "# HELP x\nvllm:num_requests_running{model_name=\"a b\"} 3.0\nvllm:num_requests_running{model_name=\"c\"} 1\nvllm:num_requests_waiting{model_name=\"a\"} 5 1700000000\nvllm:kv_cache_usage_perc 0.25\n", "Content-Type", "text/plain")}, StateReady, figures{4, -1, 5}},
		{"sglang", loaded, map[string]http.HandlerFunc{"/health": workertest.Says(200, ``), "/metrics": workertest.Says(200, "sglang:num_running_reqs{model_name=\"m\"} 3.0\nsglang:num_queue_reqs{model_name=\"m\"} 5.0\nsglang:token_usage{model_name=\"m\"} 0.25\n", "Content-Type", "text/plain")}, StateReady, figures{3, -1, 5}},
		{"tgi", loaded, map[string]http.HandlerFunc{"/health": workertest.Says(200, ``), "/metrics": workertest.Says(200, "# TYPE tgi_queue_size gauge\ntgi_queue_size 5\n# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size 3\n", "Content-Type", "text/plain")}, StateReady, figures{-1, -1, 5}},
		{"llama.cpp slots", slotted, map[string]http.HandlerFunc{"/health": workertest.Says(200, `{"status":"ok"}`), "/slots": workertest.Says(200, `[{"id":0,"is_processing":true},{"id":1,"is_processing":true}]`)}, StateBusy, figures{2, 2, -1}},
		{"llama.cpp loading", chat, map[string]http.HandlerFunc{"/health": workertest.Says(503, `{"error":{"code":503,"message":"Loading model"}}`)}, StateStarting, none},
		{"ollama", chat, map[string]http.HandlerFunc{"/v1/models": workertest.Says(200, `{"data":[]}`)}, StateReady, none},
		{"engine dead", chat, map[string]http.HandlerFunc{"/health": workertest.Says(503, ``)}, StateUnhealthy, none},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, routes(c.answers))
			h := newAdapter(t, c.model, s.URL, 1).Probe(t.Context())
			got := figures{figure(h.Active), figure(h.Capacity), figure(h.Queued)}
			if h.State != c.state || got != c.figures {
				t.Errorf("got %s %+v (%s), want %s %+v", h.State, got, h.Reason, c.state, c.figures)
			}
			if c.name == "vllm" && (h.KVUsage == nil || *h.KVUsage != 0.25) {
				t.Errorf("KV usage %v, want 0.25", h.KVUsage)
			}
		})
	}
}

func figure(n *int) int {
	if n == nil {
		return -1
	}
	return *n
}

func TestRequestsOfEachProtocol(t *testing.T) {
	withTemplate := Model{Name: "m", Protocol: ProtocolCog, Body: []byte(`{"input":{"text":"$payload.prompt","n":1,"gone":"$payload.absent"}}`)}
	for _, c := range []struct {
		name, endpoint   string
		model            Model
		payload          string
		method, at, body string
		header           [2]string
	}{
		{
			"dispatcher", "/generate",
			Model{Name: "m", Protocol: ProtocolGeneric},
			`{"prompt":"x"}`, "POST", "/generate", `{"prompt":"x"}`,
			[2]string{"X-Source", "dispatcher"},
		},
		{
			"dispatcher with template", "/generate",
			Model{Name: "m", Protocol: ProtocolGeneric, Body: []byte(`{"id":"$entry","job":"$payload","try":"$attempt","cost":"$$5"}`)},
			`{"big":9007199254740993}`, "POST", "/generate", `{"cost":"$5","id":"entry-17","job":{"big":9007199254740993},"try":3}`,
			[2]string{"X-Source", "dispatcher"},
		},
		{
			"cog sync", "",
			Model{Name: "m", Protocol: ProtocolCog},
			`{"image":"data:,"}`, "PUT", "/predictions/entry-17", `{"id":"entry-17","input":{"image":"data:,"}}`,
			[2]string{"Prefer", ""},
		},
		{
			"cog async", "",
			Model{Name: "m", Protocol: ProtocolCog, Type: TypeAsync},
			`null`, "PUT", "/predictions/entry-17", `{"id":"entry-17","input":{},"webhook":"http://127.0.0.1:9/callback/unguessable","webhook_events_filter":["completed"]}`,
			[2]string{"Prefer", "respond-async"},
		},
		{
			"cog with template", "/", withTemplate,
			`{"prompt":"x"}`, "PUT", "/predictions/entry-17", `{"id":"entry-17","input":{"n":1,"text":"x"}}`,
			[2]string{"Prefer", ""},
		},
		{
			"oip", "",
			Model{Name: "m", Protocol: ProtocolOIP, RemoteName: "vad/5", Version: "2"},
			`{"inputs":[]}`, "POST", "/v2/models/vad%2F5/versions/2/infer", `{"id":"entry-17","inputs":[]}`,
			[2]string{"Accept", "application/json"},
		},
		{
			"chat", "/v1",
			Model{Name: "m", Protocol: ProtocolOpenAI, RemoteName: "llama"},
			`{"messages":[]}`, "POST", "/v1/chat/completions", `{"messages":[],"model":"llama"}`,
			[2]string{"X-Request-Id", "entry-17-42"},
		},
		{
			"completions, streamed", "",
			Model{Name: "m", Protocol: ProtocolOpenAI, Operation: OperationCompletions, Stream: true},
			`{"prompt":"x"}`, "POST", "/v1/completions", `{"model":"m","prompt":"x","stream":true,"stream_options":{"include_usage":true}}`,
			[2]string{"Accept", "text/event-stream, application/json"},
		},
		{
			"embeddings are not streamed", "",
			Model{Name: "m", Protocol: ProtocolOpenAI, Operation: OperationEmbeddings, Stream: true, RemoteNames: []string{"e5"}},
			`{"input":["x"],"model":"e5"}`, "POST", "/v1/embeddings", `{"input":["x"],"model":"e5"}`,
			[2]string{"Accept", "application/json"},
		},
		{
			"images", "",
			Model{Name: "m", Protocol: ProtocolOpenAI, Operation: OperationImages},
			`{"prompt":"x"}`, "POST", "/v1/images/generations", `{"model":"m","prompt":"x"}`,
			[2]string{"Accept", "application/json"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, workertest.Says(200, `{}`))
			newAdapter(t, c.model, s.URL+c.endpoint, 1).Submit(t.Context(), testCall(c.payload))
			r := s.Requests()[0]
			if r.Method != c.method || r.Path != c.at || r.Body != c.body || r.Header.Get(c.header[0]) != c.header[1] {
				t.Errorf("worker was sent %s %s\n%s\n%s: %q", r.Method, r.Path, r.Body, c.header[0], r.Header.Get(c.header[0]))
			}
		})
	}
}

func TestPayloadsThatNoWorkerShouldSee(t *testing.T) {
	for _, c := range []struct {
		name    string
		model   Model
		payload string
		change  func(*Call)
	}{
		{"not JSON", Model{Name: "m", Protocol: ProtocolGeneric}, `{`, nil},
		{"no inputs", Model{Name: "m", Protocol: ProtocolOIP}, `{"prompt":"x"}`, nil},
		{"not an object", Model{Name: "m", Protocol: ProtocolOpenAI}, `[]`, nil},
		{"unknown operation", Model{Name: "m", Protocol: ProtocolOpenAI}, `{}`, func(c *Call) { c.Operation = "audio" }},
	} {
		s := workertest.NewScript(t, workertest.Says(200, `{}`))
		call := testCall(c.payload)
		if c.change != nil {
			c.change(&call)
		}
		want{kind: Rejected, class: ClassInput}.check(t, newAdapter(t, c.model, s.URL, 1).Submit(t.Context(), call))
		if n := len(s.Requests()); n != 0 {
			t.Errorf("%s: worker saw %d requests", c.name, n)
		}
	}
}

// A node that was given no address for reports must not end the entries of the queue for that.
func TestCogCallWithoutAnAddressToReportToIsNotTheEntrysFault(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(202, `{"id":"entry-17","status":"starting"}`))
	call := testCall(`{}`)
	call.Callback = ""
	o := newAdapter(t, Model{Name: "m", Protocol: ProtocolCog, Type: TypeAsync}, s.URL, 1).Submit(t.Context(), call)
	want{kind: NotReady}.check(t, o)
	if !o.Unsent || len(s.Requests()) != 0 {
		t.Errorf("unsent %v, %d requests", o.Unsent, len(s.Requests()))
	}
}

func TestParseCogCallback(t *testing.T) {
	for _, c := range []struct {
		body string
		want want
		bad  bool
	}{
		{`{"id":"e","status":"processing","logs":"1%"}`, want{kind: Accepted, remote: "e"}, false},
		{`{"id":"e","status":"starting"}`, want{kind: Accepted, remote: "e", starting: true}, false},
		{`{"id":"e","status":"succeeded","output":["a"],"metrics":{"predict_time":1}}`, want{kind: Done, result: `["a"]`}, false},
		{`{"id":"e","status":"failed","error":"CUDA out of memory"}`, want{kind: Failed, class: ClassOOM}, false},
		{`{"id":"e","status":"failed","error":"rate limit of the tokenizer service"}`, want{kind: Failed, class: ClassTransient}, false},
		{`{"id":"e","status":"canceled"}`, want{kind: Cancelled}, false},
		{`{"id":"other","status":"succeeded"}`, want{}, true},
		{`{"status":"succeeded"}`, want{}, true},
		{`{"id":"e","status":"nirvana"}`, want{}, true},
		{`{"id":`, want{}, true},
	} {
		o, err := ParseCogCallback(RunRef{Entry: "e"}, []byte(c.body))
		if (err != nil) != c.bad {
			t.Errorf("%s: error %v", c.body, err)
		}
		if err == nil {
			c.want.check(t, o)
		}
	}
	early, _ := ParseCogCallback(RunRef{Entry: "e"}, []byte(`{"id":"e","status":"processing","logs":"1%"}`))
	later, _ := ParseCogCallback(RunRef{Entry: "e"}, []byte(`{"id":"e","status":"processing","logs":"2%"}`))
	if early.Progress == later.Progress {
		t.Error("progress did not change with the logs")
	}
}

func TestCallbackTokenBelongsToOneLock(t *testing.T) {
	key := []byte("0123456789abcdef0123456789abcdef")
	token := CallbackToken(key, "e1", 7)
	if !CheckCallbackToken(key, "e1", 7, token) {
		t.Error("own token refused")
	}
	for _, other := range []struct {
		key   string
		entry string
		token int64
		given string
	}{
		{string(key), "e1", 8, token},
		{string(key), "e2", 7, token},
		{"another key of thirty-two bytes..", "e1", 7, token},
		{string(key), "e1", 7, ""},
		{string(key), "e1", 7, token + "A"},
	} {
		if CheckCallbackToken([]byte(other.key), other.entry, other.token, other.given) {
			t.Errorf("token accepted for %+v", other)
		}
	}
	if CallbackToken(key, "1:2", 3) == CallbackToken(key, "1", 23) {
		t.Error("two locks share a token")
	}
}
