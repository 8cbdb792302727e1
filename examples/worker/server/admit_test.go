package server

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

func TestDispatcherIsRefusedWhenAllSlotsAreBusy(t *testing.T) {
	inWorld(t, Config{Slots: 2}, func(w *world) {
		a := w.send("POST", "/gate", `"a"`, fromDispatcher)
		b := w.send("POST", "/gate", `"b"`, fromDispatcher)
		p := w.send("POST", "/echo", `1`, fromDispatcher)
		if p.rec.Header().Get("Retry-After") == "" {
			t.Error("a busy answer has no Retry-After")
		}
		if got := p.answer(); got.Code != 503 || got.Detail != "GPU busy" {
			t.Errorf("third call on two slots: %+v", got)
		}
		if got := w.health(); got.Active != 2 || got.Max != 2 || got.Queued != 0 || got.Status != "ready" {
			t.Errorf("health: %+v", got)
		}
		w.open("a")
		w.expect(a.answer(), 200, "success")
		w.expect(w.post("/echo", `1`, fromDispatcher), 200, "success")
		w.open("b")
		w.expect(b.answer(), 200, "success")
		if got := w.health(); got.Active != 0 || got.Completed != 3 || got.Failed != 0 {
			t.Errorf("health: %+v", got)
		}
	})
}

func TestDirectCallersQueueInOrderAndGoFirst(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		w.send("POST", "/gate", `"held"`, fromDispatcher)
		var direct []*pending
		for i := range 10 {
			p := w.send("POST", "/gate", fmt.Sprintf(`"%d"`, i))
			if !p.waits() {
				t.Fatalf("direct call %d was answered: %+v", i, p.answer())
			}
			direct = append(direct, p)
		}
		if got := w.post("/gate", `"one too many"`); got.Code != 503 || got.Detail != "Queue full" {
			t.Errorf("eleventh direct call: %+v", got)
		}
		if got := w.health(); got.Queued != 10 || got.Active != 1 {
			t.Errorf("health: %+v", got)
		}
		w.open("held")
		for i, p := range direct {
			// Until the last direct caller runs, the dispatcher finds both the slot and the queue taken.
			w.expect(w.post("/echo", `1`, fromDispatcher), 503, "GPU busy")
			w.open(fmt.Sprint(i))
			w.expect(p.answer(), 200, "success")
		}
		if got, want := w.gate.runs(), strings.Fields("held 0 1 2 3 4 5 6 7 8 9"); !slices.Equal(got, want) {
			t.Errorf("order %v, want %v", got, want)
		}
		w.expect(w.post("/echo", `1`, fromDispatcher), 200, "success")
	})
}

func TestDirectAsyncCallerLearnsItsPosition(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		w.send("POST", "/gate", `"held"`)
		w.send("POST", "/gate", `"first"`)
		second := w.post("/gate?async=true", `"second"`)
		if second.Status != "queued" || second.Position != 2 {
			t.Errorf("second in the queue: %+v", second)
		}
		w.open("held")
		if got := w.get("/status/" + second.JobID); got.Status != "queued" || got.Position != 1 {
			t.Errorf("after one left: %+v", got)
		}
		w.open("first")
		w.expect(w.get("/status/"+second.JobID), 200, "processing")
		w.open("second")
		w.expect(w.get("/status/"+second.JobID), 200, "completed")
	})
}

func TestHangingUpStopsTheRunAndFreesTheSlot(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		running := w.send("POST", "/gate", `"a"`, fromDispatcher)
		waiting := w.send("POST", "/gate", `"b"`)
		waiting.hangUp()
		<-waiting.done
		if got := w.health(); got.Queued != 0 || got.Active != 1 {
			t.Errorf("after the waiting caller hung up: %+v", got)
		}
		running.hangUp()
		<-running.done
		if got := w.health(); got.Active != 0 || got.Failed != 2 {
			t.Errorf("after the running caller hung up: %+v", got)
		}
		if got := w.gate.runs(); !slices.Equal(got, []string{"a"}) {
			t.Errorf("runs %v, want only a", got)
		}
	})
}

func TestClosedConnectionFreesTheSlot(t *testing.T) {
	s, err := New(Config{Slots: 1})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate()
	s.SetModels([]model.Model{g})
	ts := httptest.NewServer(s.Handler())
	t.Cleanup(ts.Close)

	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, ts.URL+"/gate", strings.NewReader(`"a"`))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if res, err := http.DefaultClient.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	eventually(t, func() bool { return len(g.runs()) == 1 })
	cancel()
	<-closed
	eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.active == 0 && s.failed == 1
	})
}

// eventually polls what a real connection makes true at a time of its own.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 10 s")
		}
	}
}

func TestDeadlineEndsRunningAndWaitingCalls(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		began := time.Now()
		running := w.send("POST", "/gate", `"a"`, "Penstock-Remaining-Ms: 1500")
		waiting := w.send("POST", "/gate", `"b"`, "Penstock-Remaining-Ms: 400")
		w.expect(waiting.answer(), 504, "deadline exceeded")
		if took := time.Since(began); took != 400*time.Millisecond {
			t.Errorf("waiting call ended after %v", took)
		}
		w.expect(running.answer(), 504, "deadline exceeded")
		if took := time.Since(began); took != 1500*time.Millisecond {
			t.Errorf("running call ended after %v", took)
		}
		if got := w.health(); got.Active != 0 || got.Queued != 0 {
			t.Errorf("health: %+v", got)
		}
		w.expect(w.post("/gate", `"c"`, "Penstock-Remaining-Ms: 0"), 504, "deadline exceeded")

		id := w.post("/gate?async=true", `"d"`, "Penstock-Remaining-Ms: 1000").JobID
		time.Sleep(time.Second)
		w.expect(w.get("/status/"+id), 200, "failed|deadline exceeded")
		if got := w.gate.runs(); !slices.Equal(got, []string{"a", "d"}) {
			t.Errorf("runs %v, want a and d", got)
		}
	})
}
