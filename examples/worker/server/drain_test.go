package server

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func (w *world) drain(grace time.Duration) <-chan error {
	drained := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		drained <- w.s.Drain(ctx)
	}()
	synctest.Wait()
	return drained
}

func TestDrainRefusesNewCallsAndFinishesOldOnes(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		running := w.send("POST", "/gate", `"a"`)
		waiting := w.send("POST", "/gate", `"b"`)
		drained := w.drain(time.Minute)
		w.expect(w.post("/echo", `1`), 503, "shutting down")
		if p := w.send("GET", "/health", ""); p.rec.Code != 503 {
			t.Errorf("health while draining: %d", p.rec.Code)
		}
		if h := w.health(); h.Status != "shutting down" || h.Active != 1 {
			t.Errorf("health while draining: %+v", h)
		}
		w.open("a")
		w.expect(running.answer(), 200, "success")
		w.open("b")
		w.expect(waiting.answer(), 200, "success")
		if err := <-drained; err != nil {
			t.Errorf("drain: %v", err)
		}
	})
}

func TestCallThatWasReadBeforeTheDrainStartsNoRun(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		w.drain(time.Minute)
		if _, _, _, err := w.s.admit(&call{}); !errors.Is(err, errDraining) {
			t.Errorf("admit: %v, want %v", err, errDraining)
		}
	})
}

func TestDrainStopsRunsWhenTheGraceEnds(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		call := w.send("POST", "/gate", `"a"`)
		began := time.Now()
		if err := <-w.drain(30 * time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("drain: %v", err)
		}
		if took := time.Since(began); took != 30*time.Second {
			t.Errorf("drain took %v, want the grace", took)
		}
		w.expect(call.answer(), 503, "shutting down")
	})
}

func TestDrainWaitsALittleForUnfetchedResults(t *testing.T) {
	inWorld(t, Config{Linger: 5 * time.Second}, func(w *world) {
		id := w.post("/gate?async=true", `"a"`).JobID
		drained := w.drain(time.Minute)
		w.open("a")
		time.Sleep(2 * time.Second)
		select {
		case err := <-drained:
			t.Fatalf("drain ended before the result was fetched: %v", err)
		default:
		}
		w.expect(w.get("/status/"+id), 200, "completed")
		if err := <-drained; err != nil {
			t.Errorf("drain: %v", err)
		}
	})
	inWorld(t, Config{Linger: 5 * time.Second}, func(w *world) {
		w.post("/gate?async=true", `"never fetched"`)
		w.open("never fetched")
		began := time.Now()
		if err := <-w.drain(time.Minute); err != nil || time.Since(began) != 5*time.Second {
			t.Errorf("drain: %v after %v, want 5 s", err, time.Since(began))
		}
	})
}
