package server

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDelayAndJitterHoldTheSlot(t *testing.T) {
	faults := Faults{Delay: Duration(time.Second), DelayJitter: Duration(500 * time.Millisecond)}
	inWorld(t, Config{Slots: 1, Faults: faults, Seed: 3}, func(w *world) {
		seen := map[time.Duration]bool{}
		for range 20 {
			began := time.Now()
			p := w.send("POST", "/echo", `1`)
			if h := w.health(); h.Active != 1 {
				t.Fatalf("health during the delay: %+v", h)
			}
			w.expect(p.answer(), 200, "success")
			took := time.Since(began)
			seen[took] = true
			if took < time.Second || took > 1500*time.Millisecond {
				t.Errorf("took %v, want 1 to 1.5 s", took)
			}
		}
		if len(seen) < 15 {
			t.Errorf("only %d different delays in 20", len(seen))
		}
	})
}

func TestRatesHitTheirShareAndTheSameCallsForTheSameSeed(t *testing.T) {
	story := func(seed uint64) (fates string) {
		inWorld(t, Config{Faults: Faults{FailRate: 0.3, BusyRate: 0.2}, Seed: seed}, func(w *world) {
			for range 500 {
				got := w.post("/echo", `1`, fromDispatcher)
				switch {
				case got.Code == 200:
					fates += "+"
				case got.Code == 500 && got.Status == "failed" && got.Error == "injected failure":
					fates += "f"
				case got.Code == 503 && got.Detail == "GPU busy":
					fates += "b"
				default:
					t.Fatalf("unexpected answer %+v", got)
				}
			}
		})
		return fates
	}
	first := story(1)
	if busy := strings.Count(first, "b"); busy < 70 || busy > 130 {
		t.Errorf("%d of 500 busy, want about 100", busy)
	}
	if failed := strings.Count(first, "f"); failed < 90 || failed > 150 {
		t.Errorf("%d of 500 failed, want about 120", failed)
	}
	if story(1) != first {
		t.Error("the same seed gave other faults")
	}
	if story(2) == first {
		t.Error("another seed gave the same faults")
	}
}

func TestDirectCallersAreNeverRefusedByBusyRate(t *testing.T) {
	inWorld(t, Config{Faults: Faults{BusyRate: 1}}, func(w *world) {
		w.expect(w.post("/echo", `1`, fromDispatcher), 503, "GPU busy")
		w.expect(w.post("/echo", `1`), 200, "success")
	})
}

func TestHangingRunEndsOnlyFromOutside(t *testing.T) {
	inWorld(t, Config{Slots: 1, Faults: Faults{HangRate: 1}}, func(w *world) {
		id := w.post("/echo?async=true", `1`).JobID
		time.Sleep(24 * time.Hour)
		w.expect(w.get("/status/"+id), 200, "processing")
		w.expect(w.post("/cancel/"+id, ""), 200, "cancelled")
		w.expect(w.post("/echo", `1`, "Penstock-Remaining-Ms: 100"), 504, "deadline")
	})
}

func TestDroppedCallWasCarriedOut(t *testing.T) {
	inWorld(t, Config{Faults: Faults{DropRate: 1}}, func(w *world) {
		p := w.send("POST", "/gate", `"a"`)
		w.open("a")
		<-p.done
		if !p.abort || w.health().Completed != 1 {
			t.Errorf("connection broken: %v, health %+v", p.abort, w.health())
		}

		p = w.send("POST", "/gate?async=true", `"b"`, entry7, token(5))
		<-p.done
		if !p.abort {
			t.Error("the answer to an asynchronous call came through")
		}
		// Asked again, the worker tells the job it had accepted.
		w.expect(w.post("/gate?async=true", `"b"`, entry7, token(5)), 200, "processing")
		w.open("b")
		w.expect(w.get("/status/7"), 200, "completed")
		if runs := w.gate.runs(); !slices.Equal(runs, []string{"a", "b"}) {
			t.Errorf("ran %v", runs)
		}
	})
}

func TestCrashHappensInTheMiddleOfTheNthRun(t *testing.T) {
	var codes []int
	cfg := Config{Faults: Faults{CrashAfter: 3}, Exit: func(code int) { codes = append(codes, code) }}
	inWorld(t, cfg, func(w *world) {
		for i := 1; i <= 5; i++ {
			w.post("/echo", `1`)
			if want := i >= 3; (len(codes) == 1) != want {
				t.Errorf("after run %d: exits %v", i, codes)
			}
		}
		if !slices.Equal(codes, []int{crashCode}) {
			t.Errorf("exits %v", codes)
		}
	})
}

func TestSlowStartAndMissingModelsAreNotReady(t *testing.T) {
	inWorld(t, Config{Faults: Faults{SlowStart: Duration(3 * time.Second)}}, func(w *world) {
		w.expect(w.post("/echo", `1`, fromDispatcher), 503, "starting")
		w.expect(w.get("/health"), 503, "starting")
		time.Sleep(3 * time.Second)
		w.expect(w.post("/echo", `1`, fromDispatcher), 200, "success")
		w.expect(w.get("/health"), 200, "ready")
		w.s.SetModels(nil)
		w.s.models = nil
		w.expect(w.post("/echo", `1`), 503, "starting")
	})
}

func TestFaultsChangeAtRunTimeOnlyWhereAllowed(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		w.expect(w.post("/faults", `{"fail_rate":1}`), 403, "--allow-faults")
		w.expect(w.send("DELETE", "/faults", "").answer(), 403, "--allow-faults")
		w.expect(w.post("/echo", `1`), 200, "success")
	})
	inWorld(t, Config{AllowFaults: true, Faults: Faults{Delay: Duration(time.Second)}}, func(w *world) {
		w.post("/faults", `{"fail_rate":1}`)
		if got := w.faults(); got.FailRate != 1 || got.Delay != Duration(time.Second) {
			t.Errorf("a change touched what it does not name: %+v", got)
		}
		w.expect(w.post("/echo", `1`), 500, "injected failure")
		w.post("/faults", `{"fail_rate":0,"slow_start":"2s"}`)
		w.expect(w.get("/health"), 503, "starting")
		time.Sleep(2 * time.Second)
		w.expect(w.post("/echo", `1`), 200, "success")

		w.send("DELETE", "/faults", "")
		if got := w.faults(); got != (Faults{}) {
			t.Errorf("after DELETE: %+v", got)
		}
		p := w.send("GET", "/faults", "")
		if body := p.rec.Body.String(); !strings.Contains(body, `"delay":"0s"`) || !strings.Contains(body, `"crash_after":0`) {
			t.Errorf("GET /faults: %s", body)
		}

		for body, field := range map[string]string{
			`{"fail_rate":1.5}`:     "fail_rate",
			`{"busy_rate":-1}`:      "busy_rate",
			`{"delay":"soon"}`:      "delay",
			`{"delay":5}`:           "delay",
			`{"slow_start":"-1s"}`:  "slow_start",
			`{"crash_after":-1}`:    "crash_after",
			`{"crash_after":"now"}`: "crash_after",
			`{"fial_rate":1}`:       "",
		} {
			if got := w.post("/faults", body); got.Code != 422 || got.Field != field || got.Detail == "" {
				t.Errorf("%s: %+v, want 422 naming %q", body, got, field)
			}
		}
		if got := w.faults(); got != (Faults{}) {
			t.Errorf("a refused change had an effect: %+v", got)
		}
	})
}

func TestCrashCountStartsWhenItIsSet(t *testing.T) {
	crashed := 0
	inWorld(t, Config{AllowFaults: true, Exit: func(int) { crashed++ }}, func(w *world) {
		w.post("/echo", `1`)
		w.post("/echo", `1`)
		w.post("/faults", `{"crash_after":2}`)
		w.post("/echo", `1`)
		w.post("/faults", `{"busy_rate":0}`) // does not start the count again
		if got := w.faults().CrashAfter; got != 1 || crashed != 0 {
			t.Errorf("%d runs are left until the crash, %d crashes so far", got, crashed)
		}
		w.post("/echo", `1`)
		w.post("/echo", `1`)
		if crashed != 1 {
			t.Errorf("crashed %d times, want once", crashed)
		}
	})
}

func (w *world) faults() Faults {
	w.Helper()
	f, err := w.s.faults.change(func(*Faults) error { return nil })
	if err != nil {
		w.Fatal(err)
	}
	return f
}
