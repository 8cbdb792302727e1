package worker

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

func ocrCall(t *testing.T, entry, text string, pages int, callback string) Call {
	t.Helper()
	payload, err := json.Marshal(map[string]any{"image": workertest.Picture(t, text), "pages": pages})
	if err != nil {
		t.Fatal(err)
	}
	return Call{RunRef: RunRef{Entry: entry, Token: 1, Attempt: 1}, Payload: payload, Callback: callback}
}

var (
	ocrSync  = Model{Name: "ocr", Protocol: ProtocolCog}
	ocrAsync = Model{Name: "ocr", Protocol: ProtocolCog, Type: TypeAsync, PollInterval: Seconds(50 * time.Millisecond)}
)

// reporting is the platform's side of callbacks of entry e1; it refuses the first failing
// ones with 503, as when its database is away.
func reporting(t *testing.T, failing int64) (url string, reports chan Outcome) {
	t.Helper()
	reports = make(chan Outcome, 16)
	var seen atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		o, err := ParseCogCallback(RunRef{Entry: "e1"}, body)
		if err != nil {
			t.Errorf("callback %s: %v", body, err)
		}
		if o.Kind != Accepted && seen.Add(1) <= failing {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		reports <- o
	}))
	t.Cleanup(s.Close)
	return s.URL, reports
}

func TestLiveCogSync(t *testing.T) {
	s := workertest.StartCog(t, 2)
	a := newAdapter(t, ocrSync, s.URL, 2)
	o := a.Submit(t.Context(), ocrCall(t, "e1", "THE FILE", 1, ""))
	var text string
	if o.Kind != Done || json.Unmarshal(o.Result, &text) != nil || strings.Join(strings.Fields(text), " ") != "THE FILE" {
		t.Errorf("got %s %s (%s)", o.Kind, o.Result, o.Reason)
	}
	if o.Metrics == nil || o.SentAt.IsZero() {
		t.Errorf("no metrics: %+v", o)
	}
	if h := a.Probe(t.Context()); h.State != StateReady {
		t.Errorf("probe says %+v", h)
	}
	bad := Call{RunRef: RunRef{Entry: "e2"}, Payload: []byte(`{"image":"no"}`)}
	want{kind: Rejected, class: ClassInput}.check(t, a.Submit(t.Context(), bad))
	broken := Call{RunRef: RunRef{Entry: "e3"}, Payload: []byte(`{"image":"data:image/png;base64,AAAA"}`)}
	want{kind: Failed, class: ClassTransient}.check(t, a.Submit(t.Context(), broken))
}

func TestLiveCogAsync(t *testing.T) {
	s := workertest.StartCog(t, 1)
	a := newAdapter(t, ocrAsync, s.URL, 1)
	url, _ := reporting(t, 0)
	call := ocrCall(t, "e1", "HELLO", 10_000, url)
	want{kind: Accepted, remote: "e1", starting: true}.check(t, a.Submit(t.Context(), call))

	// A second submit of the run, as by a node that took over, starts nothing.
	want{kind: Accepted, remote: "e1"}.check(t, a.Submit(t.Context(), call))
	// Another entry finds the only slot taken.
	want{kind: Busy, class: ClassBusy}.check(t, a.Submit(t.Context(), ocrCall(t, "e2", "HELLO", 1, url)))
	if h := a.Probe(t.Context()); h.State != StateBusy {
		t.Errorf("probe says %+v", h)
	}
	if n := s.Started(); n != 1 {
		t.Errorf("%d runs, want 1", n)
	}
}

func TestLiveCogReports(t *testing.T) {
	s := workertest.StartCog(t, 1)
	a := newAdapter(t, ocrAsync, s.URL, 1)
	url, reports := reporting(t, 2)
	call := ocrCall(t, "e1", "HELLO", 5, url)
	o := a.Submit(t.Context(), call)
	call.Remote = o.Remote
	end := NewFollower(a, ocrAsync).Follow(t.Context(), Pending{RunRef: call.RunRef, Starting: o.Starting, Reports: reports})
	if end.Kind != Done || strings.Count(string(end.Result), "HELLO") != 5 {
		t.Errorf("got %s %s (%s)", end.Kind, end.Result, end.Reason)
	}
	if n := s.Started(); n != 1 {
		t.Errorf("%d runs, want 1", n)
	}
}

func TestLiveCogCancel(t *testing.T) {
	s := workertest.StartCog(t, 1)
	a := newAdapter(t, ocrAsync, s.URL, 1)
	url, reports := reporting(t, 0)
	call := ocrCall(t, "e1", "HELLO", 10_000, url)
	call.Remote = a.Submit(t.Context(), call).Remote
	c := a.Cancel(t.Context(), call.RunRef)
	if !c.Delivered || c.Confirmed {
		t.Errorf("cancel: %+v", c)
	}
	want{kind: Cancelled}.check(t, NewFollower(a, ocrAsync).Follow(t.Context(), Pending{RunRef: call.RunRef, Reports: reports}))
	if !s.Idle() {
		t.Error("the slot is still held")
	}
	if c := a.Cancel(t.Context(), call.RunRef); c.Delivered {
		t.Errorf("cancel of a run that is over: %+v", c)
	}
}

func TestLiveCogRunLimitStopsTheWorker(t *testing.T) {
	s := workertest.StartCog(t, 1)
	model := ocrAsync
	model.MaxPollTime = Seconds(300 * time.Millisecond)
	a := newAdapter(t, model, s.URL, 1)
	url, reports := reporting(t, 0)
	call := ocrCall(t, "e1", "HELLO", 10_000, url)
	call.Remote = a.Submit(t.Context(), call).Remote
	o := NewFollower(a, model).Follow(t.Context(), Pending{RunRef: call.RunRef, Reports: reports})
	// The callback that confirms it comes after the limit: until then the slot counts.
	want{kind: Unknown, running: true, remote: "e1"}.check(t, o)
	workertest.WaitFor(t, s.Idle)
	for o := range reports {
		if o.Kind != Accepted {
			want{kind: Cancelled}.check(t, o)
			return
		}
	}
}

func TestLiveCogClosedConnectionStopsTheWorker(t *testing.T) {
	s := workertest.StartCog(t, 1)
	a := newAdapter(t, ocrSync, s.URL, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	call, outcomes := ocrCall(t, "e1", "HELLO", 10_000, ""), make(chan Outcome, 1)
	go func() { outcomes <- a.Submit(ctx, call) }()
	workertest.WaitFor(t, func() bool { return !s.Idle() })
	cancel()
	want{kind: Cancelled}.check(t, <-outcomes)
	workertest.WaitFor(t, s.Idle)
}

func TestLiveCogLostCallbackEndsAsUnknown(t *testing.T) {
	s := workertest.StartCog(t, 1)
	model := ocrAsync
	model.Timeouts.Silence = Seconds(time.Second)
	a := newAdapter(t, model, s.URL, 1)
	call := ocrCall(t, "e1", "HELLO", 1, nobody(t))
	call.Remote = a.Submit(t.Context(), call).Remote
	o := NewFollower(a, model).Follow(t.Context(), Pending{RunRef: call.RunRef, Reports: make(chan Outcome)})
	want{kind: Unknown}.check(t, o)
	if n := s.Started(); n != 1 {
		t.Errorf("%d runs, want 1: following must not submit", n)
	}
}
