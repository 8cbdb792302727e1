package worker

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// One contract for all protocols: what a worker answers, and what becomes of
// the call. The answers are those of the servers named in the comments.
type contract struct {
	name   string
	answer http.HandlerFunc
	want   want
}

// limit is that of the call. One that the worker does not answer has time to arrive there on a busy machine.
func (c contract) limit() Seconds {
	if c.name == "hangs" {
		return Seconds(5 * time.Second)
	}
	return Seconds(time.Minute)
}

func runContracts(t *testing.T, model Model, call Call, contracts []contract) {
	t.Helper()
	model.MaxResponseBytes = 256 << 10
	for _, c := range contracts {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			model := model
			model.Timeouts.Run = c.limit()
			s := workertest.NewScript(t, c.answer)
			c.want.check(t, newAdapter(t, model, s.URL, 1).Submit(t.Context(), call))
			if n := len(s.Requests()); n != 1 {
				t.Errorf("worker saw %d requests, want exactly 1", n)
			}
		})
	}
}

// common are the answers that mean the same in every protocol.
func common(stops bool) []contract {
	return []contract{
		{"429 with Retry-After", workertest.Says(429, `{"error":"Model is overloaded","error_type":"overloaded"}`, "Retry-After", "7"), want{kind: Busy, class: ClassBusy, retryAfter: 7 * time.Second}},
		{"503 server busy", workertest.Says(503, `{"error":"server busy, please try again.  maximum pending requests exceeded"}`), want{kind: Busy, class: ClassBusy}},
		{"503 loading", workertest.Says(503, `{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`), want{kind: NotReady, starting: true}},
		{"503 empty", workertest.Says(503, ``), want{kind: NotReady}},
		{"502 of a proxy", workertest.Says(502, `<html>bad gateway</html>`), want{kind: Unknown, running: !stops}},
		{"504 of a proxy", workertest.Says(504, ``), want{kind: Unknown, running: !stops}},
		{"408 of Ray Serve, which gave up the call", workertest.Says(408, `Request 5f0c timed out after 300s.`), want{kind: Unknown, running: !stops}},
		{"303 of Modal, where the run goes on", workertest.Says(303, ``, "Location", "/?__modal_function_call_id=fc-1"), want{kind: Unknown, running: true}},
		{"503 of Envoy, which lost the worker", workertest.Says(503, `upstream connect error or disconnect/reset before headers. reset reason: connection termination`), want{kind: Unknown, running: !stops}},
		{"503 of Envoy, which did not reach it", workertest.Says(503, `upstream connect error or disconnect/reset before headers. reset reason: connection failure`), want{kind: NotReady}},
		{"520 of Cloudflare, which lost the worker", workertest.Says(520, `<html>Web server is returning an unknown error</html>`), want{kind: Unknown, running: !stops}},
		{"522 of Cloudflare, which did not reach it", workertest.Says(522, ``), want{kind: NotReady}},
		{"524 of Cloudflare, which waited too long", workertest.Says(524, `error code: 524`), want{kind: Unknown, running: !stops}},
		{"401 is nobody's fault but ours", workertest.Says(401, `{"error":"bad key"}`), want{kind: NotReady}},
		{"redirect is not followed", workertest.Says(307, ``, "Location", "http://127.0.0.1:1/elsewhere"), want{kind: NotReady}},
		{"400", workertest.Says(400, `{"error":"bad request"}`), want{kind: Rejected, class: ClassInput}},
		{"404", workertest.Says(404, `{"error":"model not found"}`), want{kind: NotReady}},
		{"405", workertest.Says(405, ``), want{kind: NotReady}},
		{"501", workertest.Says(501, ``), want{kind: NotReady}},
		{"451", workertest.Says(451, ``), want{kind: Failed, class: ClassTransient}},
		{"400 of a TLS port of nginx", workertest.Says(400, "<html>\r\n<head><title>400 The plain HTTP request was sent to HTTPS port</title></head>\r\n<body>"), want{kind: NotReady}},
		{"400 of a TLS port of Go", workertest.Says(400, "Client sent an HTTP request to an HTTPS server.\n"), want{kind: NotReady}},
		{"400 out of memory", workertest.Says(400, `{"error":"CUDA out of memory"}`), want{kind: Failed, class: ClassOOM}},
		{"400 that speaks of CUDA", workertest.Says(400, `{"error":"prompt mentions a CUDA error"}`), want{kind: Rejected, class: ClassInput}},
		{"413", workertest.Says(413, ``), want{kind: Rejected, class: ClassInput}},
		{"422", workertest.Says(422, `{"detail":[{"loc":["body","input","n"],"msg":"not a number","type":"int"}]}`), want{kind: Rejected, class: ClassInput}},
		{"500", workertest.Says(500, `{"error":"boom"}`), want{kind: Failed, class: ClassTransient}},
		{"500 out of memory", workertest.Says(500, `{"error":"CUDA error: out of memory"}`), want{kind: Failed, class: ClassOOM}},
		{"500 context lost", workertest.Says(500, `{"detail":"CUDA error: an illegal memory access was encountered"}`), want{kind: Failed, class: ClassContextLost}},
		{"hangs", workertest.Hangs, want{kind: Unknown, running: !stops}},
		{"resets after the body", workertest.Resets, want{kind: Unknown, running: !stops}},
		{"resets inside the answer", workertest.ResetsMidBody, want{kind: Unknown, running: !stops}},
		{"huge answer", huge, want{kind: Failed, class: ClassInput}},
		{"bad JSON", workertest.Says(200, `{"status":"success","result":`), want{kind: Failed, class: ClassTransient}},
	}
}

func TestDispatcherSubmitContract(t *testing.T) {
	model := Model{Name: "flux", Protocol: ProtocolGeneric, Type: TypeAsync, PollPath: "/status/{id}"}
	runContracts(t, model, testCall(`{"prompt":"a sunset"}`), append(common(false),
		contract{"done", workertest.Says(200, `{"status":"success","result":{"url":"x"}}`), want{kind: Done, result: `{"url":"x"}`}},
		contract{"neither a status nor an id", workertest.Says(200, `{"url":"x"}`), want{kind: Failed, class: ClassTransient}},
		contract{"an id without a status", workertest.Says(200, `{"job_id":"j1"}`), want{kind: Accepted, remote: "j1"}},
		contract{"accepted", workertest.Says(200, `{"status":"processing","job_id":"j1"}`), want{kind: Accepted, remote: "j1"}},
		contract{"accepted with a number", workertest.Says(202, `{"status":"processing","job_id":123456789012345678}`), want{kind: Accepted, remote: "123456789012345678"}},
		contract{"accepted, cold", workertest.Says(200, `{"status":"queued","job_id":"j1"}`), want{kind: Accepted, remote: "j1", starting: true}},
		contract{"accepted without an id", workertest.Says(200, `{"status":"processing"}`), want{kind: Unknown, running: true}},
		contract{"accepted under a path", workertest.Says(200, `{"status":"processing","job_id":".."}`), want{kind: Unknown, running: true}},
		contract{"FastAPI busy", workertest.Says(503, `{"detail":"GPU busy"}`), want{kind: Busy, class: ClassBusy}},
		contract{"failed", workertest.Says(200, `{"status":"failed","error":"nan"}`), want{kind: Failed, class: ClassTransient}},
		contract{"failed for want of memory", workertest.Says(200, `{"status":"error","error":"torch.OutOfMemoryError"}`), want{kind: Failed, class: ClassOOM}},
		contract{"failed with a class of its own", workertest.Says(200, `{"status":"failed","error":"x","error_class":"input"}`), want{kind: Failed, class: ClassInput}},
		contract{"busy within a success", workertest.Says(200, `{"status":"failed","error":"queue full"}`), want{kind: Busy, class: ClassBusy}},
		contract{"cancelled", workertest.Says(200, `{"status":"canceled"}`), want{kind: Cancelled}},
		contract{"stale token", workertest.Says(409, `{"error":"stale token"}`), want{kind: Busy}},
		contract{"failed, with a status to match", workertest.Says(504, `{"status":"failed","error":"deadline exceeded"}`), want{kind: Failed, class: ClassTransient}},
	))
}

// An answer without a status is the result of a sync model. One that reports a failure has a status, whatever else is in it.
func TestAFailureWhoseClassIsNoTextIsNoResult(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"status":"failed","error":"out of memory","error_class":7}`))
	o := newAdapter(t, Model{Name: "flux", Protocol: ProtocolGeneric}, s.URL, 1).Submit(t.Context(), testCall(`{}`))
	want{kind: Failed, class: ClassOOM}.check(t, o)
}

func TestCogSubmitContract(t *testing.T) {
	runContracts(t, Model{Name: "ocr", Protocol: ProtocolCog}, testCall(`{"image":"data:,"}`), append(common(true),
		contract{"done", workertest.Says(200, `{"id":"entry-17","output":"text","status":"succeeded","metrics":{"predict_time":1.5}}`), want{kind: Done, result: `"text"`}},
		contract{"done without output", workertest.Says(200, `{"id":"entry-17","status":"succeeded"}`), want{kind: Done, result: `null`}},
		contract{"failed", workertest.Says(200, `{"id":"entry-17","error":"no such file","status":"failed"}`), want{kind: Failed, class: ClassTransient}},
		contract{"failed for want of memory", workertest.Says(200, `{"id":"entry-17","error":"CUDA out of memory. Tried to allocate 2 GiB","status":"failed"}`), want{kind: Failed, class: ClassOOM}},
		contract{"failed in the words of another server that is full", workertest.Says(200, `{"id":"entry-17","error":"429 Client Error: Too Many Requests for url: https://api.example","status":"failed"}`), want{kind: Failed, class: ClassTransient}},
		contract{"canceled", workertest.Says(200, `{"id":"entry-17","status":"canceled"}`), want{kind: Cancelled}},
		contract{"at capacity", workertest.Says(409, `{"error":"At capacity - all prediction slots busy","status":"failed"}`), want{kind: Busy, class: ClassBusy}},
		contract{"id in flight, Go runtime", workertest.Says(409, `prediction already exists`, "Content-Type", "text/plain"), want{kind: Accepted, remote: "entry-17"}},
		contract{"id in flight", workertest.Says(202, `{"id":"entry-17","status":"processing","input":{}}`), want{kind: Accepted, remote: "entry-17"}},
		contract{"not ready", workertest.Says(503, `{"error":"Setup has not finished","status":"failed"}`), want{kind: NotReady}},
		contract{"an error without a status", workertest.Says(200, `{"detail":"boom"}`), want{kind: Failed, class: ClassTransient}},
		contract{"an error without a status, in the words of a server that is full", workertest.Says(200, `{"detail":"queue full"}`), want{kind: Failed, class: ClassTransient}},
		contract{"a status that is none of Cog's", workertest.Says(200, `{"id":"entry-17","status":"ok","output":1}`), want{kind: Failed, class: ClassTransient}},
		contract{"another prediction's answer", workertest.Says(200, `{"id":"entry-18","output":"secret","status":"succeeded"}`), want{kind: Unknown, running: true}},
	))
}

func TestCogAsyncSubmitContract(t *testing.T) {
	model := Model{Name: "ocr", Protocol: ProtocolCog, Type: TypeAsync}
	runContracts(t, model, testCall(`{"image":"data:,"}`), []contract{
		{"accepted", workertest.Says(202, `{"id":"entry-17","status":"starting"}`), want{kind: Accepted, remote: "entry-17", starting: true}},
		{"accepted by a server in place of Cog's", workertest.Says(201, `{"id":"entry-17","status":"queued"}`), want{kind: Accepted, remote: "entry-17"}},
		{"an error without a status", workertest.Says(200, `{"detail":"boom"}`), want{kind: Failed, class: ClassTransient}},
		{"in flight already", workertest.Says(202, `{"id":"entry-17","status":"processing","input":{"image":"data:,"},"logs":""}`), want{kind: Accepted, remote: "entry-17"}},
		{"at capacity", workertest.Says(409, `{"error":"At capacity - all prediction slots busy","status":"failed"}`), want{kind: Busy, class: ClassBusy}},
		{"bad input", workertest.Says(422, `{"detail":[]}`), want{kind: Rejected, class: ClassInput}},
		{"resets", workertest.Resets, want{kind: Unknown, running: true}},
		{"hangs", workertest.Hangs, want{kind: Unknown, running: true}},
		{"504 of a proxy", workertest.Says(504, ``), want{kind: Unknown, running: true}},
	})
	want{kind: Unknown, running: true}.check(t, submitAbandoned(t, model, testCall(`{"image":"data:,"}`)))
}

func TestOIPSubmitContract(t *testing.T) {
	model := Model{Name: "vad", Protocol: ProtocolOIP}
	ok := `{"model_name":"vad","outputs":[{"name":"o","shape":[1],"datatype":"FP32","data":[0.5]}]}`
	runContracts(t, model, testCall(`{"inputs":[{"name":"i","shape":[1],"datatype":"FP32","data":[1]}]}`), append(common(false),
		contract{"done", workertest.Says(200, ok), want{kind: Done, result: ok}},
		contract{"no outputs", workertest.Says(200, `{"model_name":"vad"}`), want{kind: Failed, class: ClassTransient}},
		contract{"error within a success", workertest.Says(200, `{"error":"CUDA out of memory"}`), want{kind: Failed, class: ClassOOM}},
		contract{"Triton's queue is full", workertest.Says(503, `{"error":"Exceeds maximum queue size"}`), want{kind: Busy, class: ClassBusy}},
	))
}

func TestOpenAISubmitContract(t *testing.T) {
	chat := `{"id":"c1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}`
	runContracts(t, Model{Name: "llama", Protocol: ProtocolOpenAI}, testCall(`{"messages":[]}`), append(common(true),
		contract{"done", workertest.Says(200, chat), want{kind: Done, result: chat}},
		contract{"SGLang's queue is full", workertest.Says(503, `{"error":{"message":"The request queue is full.","code":503}}`), want{kind: Busy, class: ClassBusy}},
		contract{"engine dead", workertest.Says(503, `{"error":"EngineDeadError"}`), want{kind: NotReady, class: ClassContextLost}},
		contract{"an answer without choices", workertest.Says(200, `{"detail":"boom"}`), want{kind: Failed, class: ClassTransient}},
		contract{"an error that is not in error", workertest.Says(200, `{"detail":"CUDA out of memory"}`), want{kind: Failed, class: ClassOOM}},
		contract{"the same, in the words of a server that is full", workertest.Says(200, `{"detail":"queue full"}`), want{kind: Failed, class: ClassTransient}},
		contract{"an answer that is no object", workertest.Says(200, `"boom"`), want{kind: Failed, class: ClassTransient}},
		contract{"error within a success", workertest.Says(200, `{"error":{"message":"context too long","code":400}}`), want{kind: Rejected, class: ClassInput}},
		contract{"499 that nobody asked for", workertest.Says(499, `{"error":"request canceled"}`), want{kind: Failed, class: ClassTransient}},
		contract{"TGI's generation error", workertest.Says(424, `{"error":"Request failed during generation: CUDA out of memory","error_type":"generation"}`), want{kind: Failed, class: ClassOOM}},
		contract{"TGI lost its device", workertest.Says(424, `{"error":"CUDA error: device-side assert triggered"}`), want{kind: Failed, class: ClassContextLost}},
	))
}

// Every protocol, every way of not reaching the worker.
func TestNothingRanWhenTheWorkerWasNotReached(t *testing.T) {
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			want{kind: NotReady}.check(t, newAdapter(t, c.model, nobody(t), 1).Submit(t.Context(), c.call))
			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			want{kind: Cancelled}.check(t, newAdapter(t, c.model, nobody(t), 1).Submit(cancelled, c.call))
			late := c.call
			late.FinishBy = time.Now().Add(-time.Second)
			got := newAdapter(t, c.model, nobody(t), 1).Submit(t.Context(), late)
			want{kind: NotReady}.check(t, got)
			if !errors.Is(got.Err, ErrDeadline) {
				t.Errorf("error is %v, want ErrDeadline", got.Err)
			}
		})
	}
}

func TestMissingSecretIsNotTheEntrysFault(t *testing.T) {
	for _, c := range allProtocols() {
		s := workertest.NewScript(t, workertest.Says(200, `{}`))
		c.model.Headers = map[string]string{"Authorization": "Bearer ${env:PENSTOCK_SECRET_ABSENT}"}
		want{kind: NotReady}.check(t, newAdapter(t, c.model, s.URL, 1).Submit(t.Context(), c.call))
		if n := len(s.Requests()); n != 0 {
			t.Errorf("%s: worker saw %d requests without their secret", c.model.Protocol, n)
		}
	}
}

func TestCancelOfAnOpenCall(t *testing.T) {
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			got := submitAbandoned(t, c.model, c.call)
			if c.model.Protocol == ProtocolCog || c.model.Protocol == ProtocolOpenAI {
				want{kind: Cancelled}.check(t, got) // the protocol says that closing stops it
				return
			}
			want{kind: Unknown, running: true}.check(t, got)
		})
	}
}

// The operation of the call decides, not that of the model, unless the model says of all calls whether they stop.
func TestWhetherAClosedConnectionStopsTheRunGoesByTheCall(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		model, call string
		set         *bool
		stops       bool
	}{
		{OperationChat, OperationImages, nil, false},
		{OperationChat, OperationEmbeddings, nil, true},
		{OperationImages, OperationChat, nil, true},
		{OperationImages, "", nil, false},
		{OperationImages, OperationImages, &yes, true},
		{OperationChat, OperationCompletions, &no, false},
	} {
		model := Model{Name: "m", Protocol: ProtocolOpenAI, Operation: c.model, AbortStops: c.set}
		call := Call{
			RunRef: RunRef{Entry: "1", Token: 1}, Payload: json.RawMessage(`{"operation":"` + c.call + `"}`),
		}
		expected := want{kind: Cancelled}
		if got := model.WithDefaults().StopsOnClose(call); got != c.stops {
			t.Errorf("%s of %s: StopsOnClose is %v", c.call, c.model, got)
		}
		if !c.stops {
			expected = want{kind: Unknown, running: true}
		}
		t.Run(c.model+" "+c.call, func(t *testing.T) {
			expected.check(t, submitAbandoned(t, model.WithDefaults(), call))
		})
	}
}

func TestEveryCallNamesItsRun(t *testing.T) {
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			t.Setenv("PENSTOCK_SECRET_KEY", "s3cret")
			s := workertest.NewScript(t, workertest.Says(200, `{}`))
			c.model.Headers = map[string]string{"Authorization": "Bearer ${env:PENSTOCK_SECRET_KEY}", "X-Tier": "gold"}
			c.call.FinishBy = time.Now().Add(time.Minute)
			newAdapter(t, c.model, s.URL, 1).Submit(t.Context(), c.call)
			h := s.Requests()[0].Header
			for name, value := range map[string]string{
				"Penstock-Entry": "entry-17", "Idempotency-Key": "entry-17-42", "Penstock-Token": "42",
				"Penstock-Attempt": "3", "Traceparent": c.call.TraceParent,
				"Authorization": "Bearer s3cret", "X-Tier": "gold", "Content-Type": "application/json",
			} {
				if got := h.Get(name); got != value {
					t.Errorf("%s is %q, want %q", name, got, value)
				}
			}
			left, err := time.ParseDuration(h.Get("Penstock-Remaining-Ms") + "ms")
			if err != nil || left <= 50*time.Second || left > time.Minute {
				t.Errorf("Penstock-Remaining-Ms is %q, want a little less than 60000", h.Get("Penstock-Remaining-Ms"))
			}
		})
	}
}

// An accepted run may last longer than the submit, and its cold start is free.
func TestWorkerIsToldHowLongAnAcceptedRunMayTake(t *testing.T) {
	for name, c := range map[string]struct {
		deadline time.Duration
		want     time.Duration
	}{
		"limits of the model":   {0, 50 * time.Minute},
		"deadline of the entry": {15 * time.Minute, 15 * time.Minute},
	} {
		s := workertest.NewScript(t, workertest.Says(200, `{"status":"processing","job_id":"j"}`))
		model := Model{Name: "m", Protocol: ProtocolGeneric, Type: TypeAsync, PollPath: "/status/{id}", MaxPollTime: Seconds(20 * time.Minute)}
		call := testCall(`{}`)
		if c.deadline > 0 {
			call.FinishBy = time.Now().Add(c.deadline)
		}
		newAdapter(t, model, s.URL, 1).Submit(t.Context(), call)
		got, err := time.ParseDuration(s.Requests()[0].Header.Get("Penstock-Remaining-Ms") + "ms")
		if err != nil || got > c.want || got < c.want-10*time.Second {
			t.Errorf("%s: told %s, want %s", name, got, c.want)
		}
	}
}

// net/http sends a request with an Idempotency-Key again by itself when a kept
// connection breaks under it. That would be a second run nobody counted.
func TestBrokenKeptConnectionDoesNotSubmitTwice(t *testing.T) {
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			calls := 0
			s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				if calls++; calls == 1 {
					workertest.Says(503, `{}`)(w, r)
					return
				}
				workertest.Resets(w, r)
			})
			a := newAdapter(t, c.model, s.URL, 1)
			want{kind: NotReady}.check(t, a.Submit(t.Context(), c.call))
			if got := a.Submit(t.Context(), c.call); got.Kind != Unknown {
				t.Errorf("outcome %s, want unknown", got.Kind)
			}
			if n := len(s.Requests()); n != 2 {
				t.Errorf("worker saw %d requests, want 2", n)
			}
		})
	}
}

func TestSameRemoteIDTwiceIsNotMixedUp(t *testing.T) {
	release := make(chan struct{})
	s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			workertest.Says(200, `{"status":"processing","job_id":"j1"}`)(w, r)
			return
		}
		select {
		case <-release:
			workertest.Says(200, `{"status":"done","result":"first"}`)(w, r)
		default:
			workertest.Says(200, `{"status":"processing"}`)(w, r)
		}
	})
	model := Model{Name: "flux", Protocol: ProtocolGeneric, Type: TypeAsync, PollPath: "/status/{id}", PollInterval: Seconds(2 * time.Millisecond)}
	a := newAdapter(t, model, s.URL, 2)
	f := NewFollower(a, model)
	first, second := testCall(`{}`), testCall(`{}`)
	second.Entry = "entry-18"
	outcomes := make(chan Outcome, 1)
	first.Remote = a.Submit(t.Context(), first).Remote
	go func() { outcomes <- f.Follow(t.Context(), Pending{RunRef: first.RunRef}) }()
	workertest.WaitFor(t, func() bool { return len(s.Requests()) > 2 })
	second.Remote = a.Submit(t.Context(), second).Remote
	want{kind: Unknown, running: true}.check(t, f.Follow(t.Context(), Pending{RunRef: second.RunRef}))
	close(release)
	want{kind: Done, result: `"first"`}.check(t, <-outcomes)
	// After the first has ended the worker may use the name again.
	want{kind: Done, result: `"first"`}.check(t, f.Follow(t.Context(), Pending{RunRef: second.RunRef}))
}

type protocolCase struct {
	model Model
	call  Call
}

func allProtocols() []protocolCase {
	return []protocolCase{
		{Model{Name: "m", Protocol: ProtocolGeneric}, testCall(`{"prompt":"x"}`)},
		{Model{Name: "m", Protocol: ProtocolCog}, testCall(`{"prompt":"x"}`)},
		{Model{Name: "m", Protocol: ProtocolOIP}, testCall(`{"inputs":[]}`)},
		{Model{Name: "m", Protocol: ProtocolOpenAI}, testCall(`{"messages":[]}`)},
	}
}

// A server's error often quotes its input: a tenant must not be able to shut an instance down by text.
func TestErrorThatEchoesTheRequestIsNoEvidence(t *testing.T) {
	const fault = "CUDA error: device-side assert triggered"
	for _, c := range allProtocols() {
		t.Run(string(c.model.Protocol), func(t *testing.T) {
			var payload map[string]any
			if err := json.Unmarshal(c.call.Payload, &payload); err != nil {
				t.Fatal(err)
			}
			payload["note"] = "please explain " + fault
			text, err := json.Marshal(payload)
			if err != nil {
				t.Fatal(err)
			}
			s := workertest.NewScript(t, workertest.Says(500, `{"error":"invalid prompt: 'please explain `+fault+`'"}`))
			o := newAdapter(t, c.model, s.URL, 1).Submit(t.Context(), testCall(string(text)))
			want{kind: Failed, class: ClassTransient}.check(t, o)
		})
	}
	const port = "The plain HTTP request was sent to HTTPS port"
	if o := ClassifyAnswer(400, nil, []byte(`{"error":"invalid prompt: '`+port+`'"}`), []byte(port)); o.Kind != Rejected {
		t.Errorf("%q in the request: %s", port, o.Kind)
	}
}

func TestRequestThatCannotBeBuiltNeverLeaves(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"status":"success"}`))
	model := Model{Name: "m", Protocol: ProtocolGeneric, Headers: map[string]string{"X-Key": "env:PENSTOCK_SECRET_BROKEN"}}
	a, err := New(model, Instance{Endpoint: s.URL}, Config{Secret: func(string) (string, error) { return "a\nb", nil }})
	if err != nil {
		t.Fatal(err)
	}
	if o := a.Submit(t.Context(), testCall(`{}`)); o.Kind != NotReady || !o.Unsent || len(s.Requests()) != 0 {
		t.Errorf("%s, unsent %v, %d requests", o.Kind, o.Unsent, len(s.Requests()))
	}
}

func TestTraceThatIsNoneIsLeftOut(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"status":"success"}`))
	call := testCall(`{}`)
	call.TraceParent = "a\nb"
	o := newAdapter(t, Model{Name: "m", Protocol: ProtocolGeneric}, s.URL, 1).Submit(t.Context(), call)
	if o.Kind != Done || s.Requests()[0].Header.Get("traceparent") != "" {
		t.Errorf("%s (%s)", o.Kind, o.Reason)
	}
}

// Another model at the server may be dearer, or not be meant for whoever may push.
func TestPayloadChoosesOnlyModelsThatItMay(t *testing.T) {
	for name, want := range map[string]OutcomeKind{"llama": Done, "adapter-1": Done, "m": Done, "secret": Rejected} {
		s := workertest.NewScript(t, workertest.Says(200, `{"choices":[]}`))
		model := Model{Name: "m", RemoteName: "llama", Protocol: ProtocolOpenAI, RemoteNames: []string{"adapter-1"}}
		if o := newAdapter(t, model, s.URL, 1).Submit(t.Context(), testCall(`{"model":"`+name+`"}`)); o.Kind != want {
			t.Errorf("%s: %s (%s)", name, o.Kind, o.Reason)
		}
	}
}

func TestCogPayloadDoesNotSayWhereItsRunReports(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"id":"entry-17","status":"succeeded"}`))
	model := Model{Name: "m", Protocol: ProtocolCog, Body: json.RawMessage(`"$payload"`)}
	newAdapter(t, model, s.URL, 1).Submit(t.Context(), testCall(`{"input":{},"webhook":"http://10.0.0.1/","webhook_events_filter":["logs"]}`))
	if body := s.Requests()[0].Body; strings.Contains(body, "webhook") {
		t.Errorf("sent %s", body)
	}
}
