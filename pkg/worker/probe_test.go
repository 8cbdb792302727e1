package worker

import (
	"encoding/json"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// byPath answers by the path of a request, and with 404 elsewhere.
func byPath(answers map[string]http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if answer := answers[r.URL.Path]; answer != nil {
			answer(w, r)
			return
		}
		http.NotFound(w, r)
	}
}

// Behind an ingress that routes by path the origin is another server: probes go where the calls go.
func TestProbesGoBelowThePathOfTheEndpoint(t *testing.T) {
	chat := Model{Name: "m", Protocol: ProtocolOpenAI, LoadPath: "/metrics"}
	for _, c := range []struct {
		name, endpoint string
		model          Model
		answers        map[string]http.HandlerFunc
	}{
		{"openai with v1", "/route-a/v1", chat, map[string]http.HandlerFunc{
			"/route-a/health": workertest.Says(200, ``), "/route-a/metrics": workertest.Says(200, "vllm:num_requests_running 3\n"),
			"/health": workertest.Says(500, `another server`),
		}},
		{"openai without v1", "/route-a", chat, map[string]http.HandlerFunc{
			"/route-a/health": workertest.Says(200, ``), "/route-a/metrics": workertest.Says(200, "vllm:num_requests_running 3\n"),
		}},
		{"openai with health at the origin", "/route-a/v1", chat, map[string]http.HandlerFunc{
			"/health": workertest.Says(200, ``), "/metrics": workertest.Says(200, "vllm:num_requests_running 3\n"),
		}},
		{"openai with v1 alone", "/v1", chat, map[string]http.HandlerFunc{
			"/health": workertest.Says(200, ``), "/metrics": workertest.Says(200, "vllm:num_requests_running 3\n"),
		}},
		{"dispatcher", "/route-a/generate", Model{Name: "m", Protocol: ProtocolGeneric}, map[string]http.HandlerFunc{
			"/route-a/health": workertest.Says(200, `{"active_jobs": 3}`), "/health": workertest.Says(500, `another server`),
		}},
		{"dispatcher with health at the origin", "/route-a/generate", Model{Name: "m", Protocol: ProtocolGeneric}, map[string]http.HandlerFunc{
			"/health": workertest.Says(200, `{"active_jobs": 3}`),
		}},
		{"oip", "/route-a", Model{Name: "m", Protocol: ProtocolOIP, LoadPath: "/metrics"}, map[string]http.HandlerFunc{
			"/route-a/v2/models/m/ready": workertest.Says(200, ``), "/route-a/metrics": workertest.Says(200, "vllm:num_requests_running 3\n"),
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, byPath(c.answers))
			h := newAdapter(t, c.model, s.URL+c.endpoint, 1).Probe(t.Context())
			if h.State != StateReady || figure(h.Active) != 3 {
				t.Errorf("got %s with %d calls (%s)", h.State, figure(h.Active), h.Reason)
			}
		})
	}
}

func TestServerThatDoesNotListTheModelIsNotUsed(t *testing.T) {
	for _, c := range []struct {
		name, list string
		state      HealthState
	}{
		{"listed", `{"object":"list","data":[{"id":"other"},{"id":"llama"}]}`, StateReady},
		{"listed under its tag", `{"data":[{"id":"llama:latest"}]}`, StateReady},
		{"another model", `{"data":[{"id":"mistral"}]}`, StateUnhealthy},
		{"nothing", `{"data":[]}`, StateReady},
		{"no list", `{"models":[]}`, StateReady},
		{"no JSON", `<html>`, StateReady},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, byPath(map[string]http.HandlerFunc{
				"/health": workertest.Says(200, ``), "/v1/models": workertest.Says(200, c.list),
			}))
			h := newAdapter(t, Model{Name: "Llama.3", Protocol: ProtocolOpenAI, RemoteName: "llama"}, s.URL, 1).Probe(t.Context())
			if h.State != c.state {
				t.Errorf("got %s (%s), want %s", h.State, h.Reason, c.state)
			}
			if c.state == StateUnhealthy && (!strings.Contains(h.Reason, `"llama"`) || !strings.Contains(h.Reason, "mistral")) {
				t.Errorf("reason %q names neither", h.Reason)
			}
		})
	}
}

// Two models on one server, and two engines of one model: neither is as loaded as all of them together.
func TestLoadIsThatOfTheModel(t *testing.T) {
	const metrics = "vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 3\n" +
		"vllm:num_requests_running{engine=\"1\",model_name=\"a\"} 4\n" +
		"vllm:num_requests_running{engine=\"0\",model_name=\"b\"} 50\n" +
		"vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\"} 0.7\n" +
		"vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"a\"} 0.6\n" +
		"nv_inference_pending_request_count{model=\"a\",version=\"1\"} 2\n" +
		"nv_inference_pending_request_count{model=\"b\",version=\"1\"} 9\n"
	h := parseLoad([]byte(metrics), "a")
	if figure(h.Active) != 7 || figure(h.Queued) != 2 || h.KVUsage == nil || *h.KVUsage != 0.7 {
		t.Errorf("load of a: %d active, %d queued, KV %v", figure(h.Active), figure(h.Queued), h.KVUsage)
	}
	if h := parseLoad([]byte(metrics), "an alias"); figure(h.Active) != 57 {
		t.Errorf("load under a name that no sample has: %d active, want all 57", figure(h.Active))
	}
}

// Whatever a worker reports can be stored: counts as 32 bits, a share as one.
func TestReportedLoadCanBeStored(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		value := rapid.OneOf(
			rapid.SampledFrom([]string{"NaN", "+Inf", "-Inf", "1e300", "-1e300", "4294967296", "-1", "0.5", "1e-320"}),
			rapid.Map(rapid.Float64(), func(f float64) string { b, _ := json.Marshal(f); return string(b) }),
		).Draw(t, "value")
		for _, body := range []string{
			`{"active_jobs":` + value + `,"capacity":` + value + `,"queued":` + value + `}`,
			"vllm:num_requests_running " + value + "\nvllm:num_requests_waiting " + value + "\nvllm:kv_cache_usage_perc " + value + "\n",
		} {
			h := parseLoad([]byte(body), "m")
			for _, n := range []*int{h.Active, h.Capacity, h.Queued} {
				if n != nil && (*n < 0 || *n > math.MaxInt32) {
					t.Fatalf("%s: count %d", body, *n)
				}
			}
			if h.KVUsage != nil && !(*h.KVUsage >= 0 && *h.KVUsage <= 1) {
				t.Fatalf("%s: KV usage %v", body, *h.KVUsage)
			}
		}
	})
}

func TestTokensOfABatchOfEmbeddingsAreDivided(t *testing.T) {
	model := Model{Name: "m", Protocol: ProtocolOpenAI, Operation: OperationEmbeddings, Batch: BatchLimits{Items: 8}}
	_, b := batcher(t, model, "http://127.0.0.1:9")
	rapid.Check(t, func(t *rapid.T) {
		texts := rapid.SliceOfN(rapid.StringMatching(`[a-z]{1,300}`), 1, 8).Draw(t, "inputs")
		total := rapid.Int64Range(0, 1<<32).Draw(t, "tokens")
		var payloads []string
		var data []map[string]any
		for i, text := range texts {
			payloads = append(payloads, `{"input":"`+text+`"}`)
			data = append(data, map[string]any{"index": i, "embedding": []int{1}})
		}
		answer, _ := json.Marshal(map[string]any{"data": data, "usage": map[string]int64{"prompt_tokens": total}})
		calls := batchOf(payloads...)
		sum := int64(0)
		for i, o := range b.Split(calls, Outcome{Kind: Done, Result: answer, StatusCode: 200}) {
			var result struct {
				Usage struct {
					Prompt int64 `json:"prompt_tokens"`
				} `json:"usage"`
			}
			if err := json.Unmarshal(o.Result, &result); err != nil || result.Usage.Prompt != o.Tokens.In || o.Tokens.In < 0 {
				t.Fatalf("member %d: %s, tokens %+v (%v)", i, o.Result, o.Tokens, err)
			}
			sum += o.Tokens.In
		}
		if sum != total {
			t.Fatalf("members have %d tokens of %d", sum, total)
		}
	})
}

func TestPayloadNamesItsOperation(t *testing.T) {
	for operation, path := range operationPaths {
		s := workertest.NewScript(t, workertest.Says(200, `{"choices":[],"data":[]}`))
		call := testCall(`{"operation":"` + operation + `","input":"x"}`)
		o := newAdapter(t, Model{Name: "m", Protocol: ProtocolOpenAI}, s.URL+"/route/v1", 1).Submit(t.Context(), call)
		r := s.Requests()
		if o.Kind != Done || len(r) != 1 || r[0].Path != "/route"+path || strings.Contains(r[0].Body, "operation") {
			t.Errorf("%s: outcome %s (%s), requests %+v", operation, o.Kind, o.Reason, r)
		}
	}
	for _, payload := range []string{`{"operation":"train"}`, `{"operation":"embeddings","input":"x","stream":true}`} {
		s := workertest.NewScript(t, workertest.Says(200, `{}`))
		o := newAdapter(t, Model{Name: "m", Protocol: ProtocolOpenAI}, s.URL, 1).Submit(t.Context(), testCall(payload))
		if o.Kind != Rejected || len(s.Requests()) != 0 {
			t.Errorf("%s: outcome %s after %d requests", payload, o.Kind, len(s.Requests()))
		}
	}
}

func TestGenerateOfTriton(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"model_name":"m","text_output":"Hi"}`))
	model := Model{Name: "m", Protocol: ProtocolOIP, Operation: OperationGenerate, Version: "2"}
	o := newAdapter(t, model, s.URL, 1).Submit(t.Context(), testCall(`{"text_input":"x"}`))
	want{kind: Done, result: `{"model_name":"m","text_output":"Hi"}`}.check(t, o)
	if r := s.Requests()[0]; r.Path != "/v2/models/m/versions/2/generate" || r.Body != `{"text_input":"x"}` {
		t.Errorf("worker was asked %s with %s", r.Path, r.Body)
	}
}

// A failed generation is not a result, whatever the status that carries it.
func TestAnErrorInPlaceOfAGenerationIsAFailure(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"error":"CUDA out of memory"}`))
	o := newAdapter(t, Model{Name: "m", Protocol: ProtocolOIP, Operation: OperationGenerate}, s.URL, 1).
		Submit(t.Context(), testCall(`{"text_input":"x"}`))
	want{kind: Failed, class: ClassOOM}.check(t, o)
}

// Triton has the outputs of a model as members of the answer, by the names that its author chose.
func TestAnOutputMayHaveTheNameError(t *testing.T) {
	const answer = `{"error":"none","model_name":"m","model_version":"1","score":0.5}`
	for name, says := range map[string]http.HandlerFunc{
		"whole":    workertest.Says(200, answer),
		"streamed": streams("data: " + answer + "\n\n"),
	} {
		s := workertest.NewScript(t, says)
		model := Model{Name: "m", Protocol: ProtocolOIP, Operation: OperationGenerate, Stream: name == "streamed"}
		o := newAdapter(t, model, s.URL, 1).Submit(t.Context(), testCall(`{"text_input":"x"}`))
		t.Run(name, func(t *testing.T) { want{kind: Done, result: answer}.check(t, o) })
	}
}

// Servers of images work on when a connection closes: their slot must stay counted.
func TestClosedConnectionDoesNotStopImages(t *testing.T) {
	images := Model{Name: "m", Protocol: ProtocolOpenAI, Operation: OperationImages}
	if o := submitAbandoned(t, images, testCall(`{"prompt":"x"}`)); o.Kind != Unknown || !o.MaybeRunning {
		t.Errorf("outcome %s, running %v", o.Kind, o.MaybeRunning)
	}
}

// A server that does not answer in time may be at work, one whose host refuses the connection is not.
func TestProbeTellsAServerThatIsGoneFromOneThatIsNotReached(t *testing.T) {
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			if h := newAdapter(t, c.model, nobody(t), 1).Probe(t.Context()); h.State != StateUnhealthy || h.Unreached || !h.Gone {
				t.Errorf("nobody listens: %+v", h)
			}
			ill := workertest.NewScript(t, workertest.Says(503, `{"error":"overloaded"}`))
			if h := newAdapter(t, c.model, ill.URL, 1).Probe(t.Context()); h.State != StateUnhealthy || h.Gone {
				t.Errorf("it is ill: %+v", h)
			}
			c.model.Timeouts.Probe = Seconds(50 * time.Millisecond)
			s := workertest.NewScript(t, workertest.Hangs)
			if h := newAdapter(t, c.model, s.URL, 1).Probe(t.Context()); h.State != StateUnhealthy || !h.Unreached || h.Gone {
				t.Errorf("it hangs: %+v", h)
			}
		})
	}
}

// The probe of the Open Inference Protocol asks up to three questions. One that is not answered, or that a proxy answers
// for its server, tells nothing of what the server runs.
func TestProbeOfOIPThatIsNotAnsweredHalfWay(t *testing.T) {
	const model, server, live = "/v2/models/m/ready", "/v2/health/ready", "/v2/health/live"
	for _, c := range []struct {
		name      string
		statuses  map[string]int // 0: the question is not answered
		unreached bool
	}{
		{"model ready not answered", map[string]int{model: 0}, true},
		{"model ready lost by a proxy", map[string]int{model: 504, live: 503}, true},
		{"server ready not answered", map[string]int{model: 404, server: 0, live: 503}, true},
		{"server ready lost by a proxy", map[string]int{model: 404, server: 504, live: 503}, true},
		{"live not answered", map[string]int{model: 503, live: 0}, true},
		{"live not answered after two", map[string]int{model: 404, server: 503, live: 0}, true},
		{"live lost by a proxy", map[string]int{model: 503, live: 504}, true},
		{"ready lost by a proxy, and live", map[string]int{model: 504, live: 200}, true},
		{"answered throughout", map[string]int{model: 404, server: 503, live: 503}, false},
		{"live, not ready", map[string]int{model: 503, live: 200}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // the hanging ones wait a second
			s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				if status := c.statuses[r.URL.Path]; status != 0 {
					workertest.Says(status, ``)(w, r)
					return
				}
				workertest.Hangs(w, r)
			})
			limit := time.Minute // where all questions are answered, however busy the machine is
			for _, status := range c.statuses {
				if status == 0 {
					limit = time.Second
				}
			}
			m := Model{Name: "m", Protocol: ProtocolOIP, Timeouts: Timeouts{Probe: Seconds(limit)}}
			h := newAdapter(t, m, s.URL, 1).Probe(t.Context())
			if h.State.Serving() || h.Unreached != c.unreached {
				t.Errorf("probe says %+v", h)
			}
		})
	}
}
