package server

import (
	"testing"
	"time"
)

func TestAsyncCallIsPolledToItsResult(t *testing.T) {
	inWorld(t, Config{Async: []string{"gate"}}, func(w *world) {
		got := w.post("/gate", `"a"`, fromDispatcher)
		if got.Code != 200 || got.Status != "processing" || got.JobID == "" {
			t.Fatalf("submit: %+v", got)
		}
		if poll := w.get("/status/" + got.JobID); poll.Status != "processing" || poll.JobID != got.JobID {
			t.Errorf("while it runs: %+v", poll)
		}
		if h := w.health(); h.Active != 1 {
			t.Errorf("health while it runs: %+v", h)
		}
		w.open("a")
		for range 2 { // a result may be fetched again
			if poll := w.get("/status/" + got.JobID); poll.Status != "completed" || string(poll.Result) != `{"id":"a"}` {
				t.Errorf("after the end: %+v", poll)
			}
		}
		w.expect(w.get("/status/job_unknown"), 404, "no such job")
	})
}

func TestEachWayToAskForAJob(t *testing.T) {
	inWorld(t, Config{Async: []string{"gate"}}, func(w *world) {
		w.expect(w.post("/echo?async=true", `1`), 200, "processing")
		w.expect(w.post("/echo", `1`, "Prefer: wait=5, respond-async"), 200, "processing")
		w.expect(w.post("/generate?async=1", `{"model":"echo","payload":1}`), 200, "processing")
		w.open("a")
		w.expect(w.post("/gate?async=false", `"a"`), 200, "success")
	})
}

func TestResultsAreForgottenAfterTheirTime(t *testing.T) {
	inWorld(t, Config{Keep: time.Minute, KeepRuns: 2}, func(w *world) {
		var ids []string
		for range 3 {
			ids = append(ids, w.post("/echo?async=true", `1`).JobID)
		}
		w.expect(w.get("/status/"+ids[0]), 404, "no such job")
		w.expect(w.get("/status/"+ids[1]), 200, "completed")
		time.Sleep(time.Minute + time.Millisecond)
		w.expect(w.get("/status/"+ids[2]), 404, "no such job")
	})
}

func TestCancelFreesTheSlotBeforeItAnswers(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		id := w.post("/gate?async=true", `"a"`).JobID
		w.expect(w.post("/cancel/"+id, ""), 200, "cancelled")
		if h := w.health(); h.Active != 0 {
			t.Errorf("health after cancel: %+v", h)
		}
		w.expect(w.get("/status/"+id), 200, "failed|cancelled")
		w.expect(w.post("/cancel/"+id, ""), 200, "cancelled")
		w.expect(w.post("/cancel/job_unknown", ""), 404, "no such job")

		done := w.post("/echo?async=true", `1`).JobID
		w.expect(w.get("/status/"+done), 200, "completed")
		w.expect(w.post("/cancel/"+done, ""), 200, "completed")
	})
}

func TestSynchronousCallIsCancelledByItsEntry(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		call := w.send("POST", "/gate", `"a"`, entry7, token(5))
		waiting := w.send("POST", "/gate", `"b"`, "Penstock-Entry: 8", token(6))
		w.expect(w.post("/cancel/8", "", "Penstock-Entry: 8", token(6)), 200, "cancelled")
		w.expect(waiting.answer(), 499, "failed|cancelled")
		w.expect(w.post("/cancel/7", "", entry7, token(5)), 200, "cancelled")
		w.expect(call.answer(), 499, "failed|cancelled")
	})
}
