package worker

import (
	"encoding/json"
	"errors"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A voice activity model in ONNX Runtime, behind KServe v2.
func TestLiveOIP(t *testing.T) {
	dir := workertest.NPMInstall(t, "kserve", workertest.ForeignRuntimes()...)
	url, kill := workertest.StartProcess(t, "node", filepath.Join(dir, "server.mjs"))
	a := newAdapter(t, Model{Name: "vad", Protocol: ProtocolOIP}, url, 1)
	workertest.WaitFor(t, func() bool { return a.Probe(t.Context()).State == StateReady })

	tensor := func(name, datatype string, shape []int, data any) map[string]any {
		return map[string]any{"name": name, "datatype": datatype, "shape": shape, "data": data}
	}
	infer := func(entry string, sound []float64) Outcome {
		payload, err := json.Marshal(map[string]any{"inputs": []any{
			tensor("input", "FP32", []int{1, len(sound)}, sound),
			tensor("state", "FP32", []int{2, 1, 128}, make([]float64, 256)),
			tensor("sr", "INT64", []int{}, []int{16000}),
		}})
		if err != nil {
			t.Fatal(err)
		}
		return a.Submit(t.Context(), Call{RunRef: RunRef{Entry: entry, Token: 1, Attempt: 1}, Payload: payload})
	}
	type reply struct {
		ID      string `json:"id"`
		Outputs []struct {
			Name  string    `json:"name"`
			Shape []int     `json:"shape"`
			Data  []float64 `json:"data"`
		} `json:"outputs"`
	}
	read := func(o Outcome) reply {
		var r reply
		if o.Kind != Done || json.Unmarshal(o.Result, &r) != nil || len(r.Outputs) != 2 || len(r.Outputs[0].Data) != 1 || len(r.Outputs[1].Data) != 256 {
			t.Fatalf("got %s %.200s (%s)", o.Kind, o.Result, o.Reason)
		}
		return r
	}
	silence, tone := make([]float64, 512), make([]float64, 512)
	for i := range tone {
		tone[i] = math.Sin(float64(i)/7) * math.Sin(float64(i)/40)
	}
	quiet, loud := read(infer("e1", silence)), read(infer("e2", tone))
	if quiet.ID != "e1" || loud.ID != "e2" {
		t.Errorf("ids are %s and %s", quiet.ID, loud.ID)
	}
	if p := quiet.Outputs[0].Data[0]; p < 0 || p > 0.2 {
		t.Errorf("silence is taken for a voice with probability %g", p)
	}
	if quiet.Outputs[1].Data[0] == loud.Outputs[1].Data[0] {
		t.Error("the model answers the same to everything")
	}
	want{kind: Rejected, class: ClassInput}.check(t, a.Submit(t.Context(), Call{Payload: []byte(`{"inputs":[{"name":"input","datatype":"FP16","shape":[1],"data":[1]}]}`)}))
	kill()
	whereNobodyListens(t, func() Outcome { return infer("e3", silence) })
	if h := a.Probe(t.Context()); h.State != StateUnhealthy {
		t.Errorf("probe of a dead server says %+v", h)
	}
}

// whereNobodyListens waits for the outcome of a call to a server that was killed. A call before it may go out on the
// connection that the server left, before its end was read: then nothing tells that it did not run.
func whereNobodyListens(t *testing.T, submit func() Outcome) {
	t.Helper()
	var o Outcome
	workertest.WaitFor(t, func() bool {
		o = submit()
		return !o.MaybeRunning
	})
	want{kind: NotReady}.check(t, o)
}

// The project's own worker, built from examples/worker.
func TestLiveDispatcher(t *testing.T) {
	if testing.Short() {
		t.Skip("not run: -short")
	}
	binary := workertest.BuildExample(t)
	async := Model{
		Name: "echo", Protocol: ProtocolGeneric, Type: TypeAsync,
		PollPath: "/status/{id}", CancelPath: "/cancel/{id}", PollInterval: Seconds(10 * time.Millisecond),
	}
	ready := func(t *testing.T, model Model, path string, args ...string) (Adapter, func()) {
		t.Helper()
		url, kill := workertest.StartProcess(t, binary, append([]string{"--listen", "127.0.0.1:0", "--models", strings.Trim(path, "/")}, args...)...)
		a := newAdapter(t, model, url+path, 1)
		workertest.WaitFor(t, func() bool { return a.Probe(t.Context()).State.Serving() })
		return a, kill
	}
	call := func(entry string, token int64, payload string) Call {
		return Call{RunRef: RunRef{Entry: entry, Token: token, Attempt: 1}, Payload: json.RawMessage(payload)}
	}

	t.Run("sync", func(t *testing.T) {
		a, kill := ready(t, Model{Name: "language", Protocol: ProtocolGeneric}, "/language", "--slots", "3")
		o := a.Submit(t.Context(), call("e1", 1, `{"text":"Bonjour tout le monde, comment allez-vous"}`))
		if o.Kind != Done || !strings.Contains(string(o.Result), `"language":"fr"`) {
			t.Errorf("got %s %s (%s)", o.Kind, o.Result, o.Reason)
		}
		if h := a.Probe(t.Context()); figure(h.Active) != 0 || figure(h.Capacity) != 3 {
			t.Errorf("probe says %+v, active %d of %d", h, figure(h.Active), figure(h.Capacity))
		}
		want{kind: Rejected, class: ClassInput}.check(t, a.Submit(t.Context(), call("e2", 1, `{"txt":1}`)))
		kill()
		whereNobodyListens(t, func() Outcome { return a.Submit(t.Context(), call("e3", 1, `{"text":"x"}`)) })
	})
	t.Run("async, busy and stale", func(t *testing.T) {
		a, _ := ready(t, async, "/echo", "--slots", "1", "--async", "echo", "--delay", "1h")
		if o := a.Submit(t.Context(), call("e1", 5, `{"a":1}`)); o.Kind != Accepted {
			t.Fatalf("got %s (%s)", o.Kind, o.Reason)
		}
		want{kind: Busy, class: ClassBusy, retryAfter: time.Second}.check(t, a.Submit(t.Context(), call("e2", 1, `{}`)))
		stale := a.Submit(t.Context(), call("e1", 4, `{"a":1}`))
		if stale.Kind != Busy || !errors.Is(stale.Err, ErrStaleToken) {
			t.Errorf("older token: %s (%s)", stale.Kind, stale.Reason)
		}
	})
	t.Run("async, done", func(t *testing.T) {
		a, _ := ready(t, async, "/echo", "--slots", "1", "--async", "echo", "--delay", "300ms")
		c := call("e1", 5, `{"a":1}`)
		c.Remote = a.Submit(t.Context(), c).Remote
		o := NewFollower(a, async).Follow(t.Context(), Pending{RunRef: c.RunRef})
		want{kind: Done, result: `{"a":1}`}.check(t, o)
	})
	t.Run("cancel is confirmed", func(t *testing.T) {
		a, _ := ready(t, async, "/echo", "--slots", "1", "--async", "echo", "--delay", "1h")
		c := call("e1", 1, `{}`)
		c.Remote = a.Submit(t.Context(), c).Remote
		if got := a.Cancel(t.Context(), c.RunRef); !got.Confirmed {
			t.Errorf("cancel: %+v", got)
		}
		want{kind: Cancelled}.check(t, NewFollower(a, async).Follow(t.Context(), Pending{RunRef: c.RunRef}))
	})
	t.Run("run limit is enforced at the worker", func(t *testing.T) {
		model := async
		model.MaxPollTime = Seconds(100 * time.Millisecond)
		a, _ := ready(t, model, "/echo", "--slots", "1", "--async", "echo", "--delay", "1h")
		c := call("e1", 1, `{}`)
		c.Remote = a.Submit(t.Context(), c).Remote
		o := NewFollower(a, model).Follow(t.Context(), Pending{RunRef: c.RunRef})
		if o.Kind != Failed || !errors.Is(o.Err, ErrRunLimit) || o.MaybeRunning {
			t.Errorf("got %s (%s), %v", o.Kind, o.Reason, o.Err)
		}
		if h := a.Probe(t.Context()); figure(h.Active) != 0 {
			t.Errorf("worker still runs %d", figure(h.Active))
		}
	})
	t.Run("failed run", func(t *testing.T) {
		a, _ := ready(t, Model{Name: "echo", Protocol: ProtocolGeneric}, "/echo", "--fail-rate", "1")
		want{kind: Failed, class: ClassTransient}.check(t, a.Submit(t.Context(), call("e1", 1, `{}`)))
	})
	t.Run("connection drops after the run", func(t *testing.T) {
		a, _ := ready(t, Model{Name: "echo", Protocol: ProtocolGeneric}, "/echo", "--drop-rate", "1")
		want{kind: Unknown, running: true}.check(t, a.Submit(t.Context(), call("e1", 1, `{}`)))
	})
	t.Run("worker dies during a run", func(t *testing.T) {
		a, kill := ready(t, Model{Name: "echo", Protocol: ProtocolGeneric}, "/echo", "--delay", "1h")
		outcomes := make(chan Outcome, 1)
		go func() { outcomes <- a.Submit(t.Context(), call("e1", 1, `{}`)) }()
		workertest.WaitFor(t, func() bool { return figure(a.Probe(t.Context()).Active) == 1 })
		kill()
		want{kind: Unknown, running: true}.check(t, <-outcomes)
	})
}
