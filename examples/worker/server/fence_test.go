package server

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

const entry7 = "Penstock-Entry: 7"

func token(n int) string { return fmt.Sprint("Penstock-Token: ", n) }

func TestStaleTokenIsRefused(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		w.expect(w.post("/echo", `1`, entry7, token(5)), 200, "success")
		if got := w.post("/echo", `1`, entry7, token(4)); got.Code != 409 || got.Error != "stale token" {
			t.Errorf("lower token: %+v", got)
		}
		w.expect(w.post("/echo", `1`, entry7, token(5)), 200, "success")
		w.expect(w.post("/echo", `1`, entry7, token(6)), 200, "success")
		w.expect(w.post("/echo?async=true", `1`, entry7, token(5)), 409, "stale token")
		w.expect(w.post("/echo", `1`, "Penstock-Entry: 8", token(1)), 200, "success")
	})
}

func TestBusyRefusalStillRaisesTheToken(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		w.send("POST", "/gate", `"held"`)
		w.expect(w.post("/echo", `1`, fromDispatcher, entry7, token(9)), 503, "GPU busy")
		w.open("held")
		w.expect(w.post("/echo", `1`, fromDispatcher, entry7, token(8)), 409, "stale token")
	})
}

func TestSameEntryAndTokenGetTheSameJob(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		first := w.post("/gate?async=true", `"a"`, entry7, token(5))
		again := w.post("/gate?async=true", ` "a" `, entry7, token(5))
		if first.JobID == "" || again.JobID != first.JobID || again.Status != "processing" {
			t.Errorf("first %+v, again %+v", first, again)
		}
		w.open("a")
		after := w.post("/gate?async=true", `"a"`, entry7, token(5))
		if after.JobID != first.JobID || after.Status != "completed" {
			t.Errorf("after the end: %+v", after)
		}
		byEntry := w.get("/status/7")
		if byEntry.JobID != first.JobID || string(byEntry.Result) != `{"id":"a"}` {
			t.Errorf("asked by entry: %+v", byEntry)
		}
		if runs := w.gate.runs(); len(runs) != 1 {
			t.Errorf("ran %v, want once", runs)
		}
	})
}

func TestHigherTokenTakesOverTheRunningJob(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		first := w.post("/gate?async=true", `"a"`, fromDispatcher, entry7, token(5))
		second := w.post("/gate?async=true", `"a"`, fromDispatcher, entry7, token(6))
		if second.JobID != first.JobID || second.Status != "processing" {
			t.Errorf("take-over: %+v, want job %s", second, first.JobID)
		}
		w.expect(w.get("/status/"+first.JobID, entry7, token(5)), 409, "stale token")
		w.expect(w.post("/cancel/"+first.JobID, "", entry7, token(5)), 409, "stale token")
		w.open("a")
		w.expect(w.get("/status/"+first.JobID, entry7, token(6)), 200, "completed")
		third := w.post("/gate?async=true", `"a"`, fromDispatcher, entry7, token(7))
		if third.JobID != first.JobID || third.Status != "completed" {
			t.Errorf("take-over of a finished job: %+v", third)
		}
		if runs := w.gate.runs(); len(runs) != 1 {
			t.Errorf("ran %v, want once", runs)
		}
	})
}

func TestFailedJobRunsAgainOnlyUnderAHigherToken(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		first := w.post("/gate?async=true", `"a"`, entry7, token(5))
		w.gate.door("a") <- errInjected
		w.expect(w.get("/status/"+first.JobID), 200, "failed|injected failure")
		same := w.post("/gate?async=true", `"a"`, entry7, token(5))
		if same.JobID != first.JobID || same.Status != "failed" {
			t.Errorf("same token: %+v", same)
		}
		retry := w.post("/gate?async=true", `"a"`, entry7, token(6))
		if retry.JobID == first.JobID || retry.Status != "processing" {
			t.Errorf("higher token: %+v", retry)
		}
		w.open("a")
		w.expect(w.get("/status/"+retry.JobID), 200, "completed")
		w.expect(w.get("/status/"+first.JobID), 200, "failed")
		if runs := w.gate.runs(); len(runs) != 2 {
			t.Errorf("ran %v, want twice", runs)
		}
	})
}

func TestHigherTokenTakesOverASynchronousCall(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		old := w.send("POST", "/gate", `"a"`, fromDispatcher, entry7, token(5))
		twin := w.send("POST", "/gate", `"a"`, fromDispatcher, entry7, token(5))
		if !old.waits() || !twin.waits() {
			t.Fatal("two calls under one token do not share the run")
		}
		newer := w.send("POST", "/gate", `"a"`, fromDispatcher, entry7, token(6))
		w.expect(old.answer(), 409, "stale token")
		w.expect(twin.answer(), 409, "stale token")
		w.open("a")
		w.expect(newer.answer(), 200, "success")
		if runs := w.gate.runs(); len(runs) != 1 {
			t.Errorf("ran %v, want once", runs)
		}
	})
}

func TestStoppedRunIsNotTakenOver(t *testing.T) {
	inWorld(t, Config{Slots: 2}, func(w *world) {
		old := w.send("POST", "/gate", `"a"`, entry7, token(5))
		old.hangUp()
		newer := w.send("POST", "/gate", `"a"`, entry7, token(6))
		w.open("a")
		w.expect(newer.answer(), 200, "success")
		if runs := w.gate.runs(); !slices.Equal(runs, []string{"a", "a"}) {
			t.Errorf("ran %v, want a second run", runs)
		}
	})
}

func TestStubbornRunKeepsItsSlotButIsNotTakenOver(t *testing.T) {
	inWorld(t, Config{Slots: 2}, func(w *world) {
		old := w.send("POST", "/gate", `"stubborn"`, entry7, token(5))
		old.hangUp()
		if h := w.health(); h.Active != 1 {
			t.Errorf("the slot of a run that has not stopped: %+v", h)
		}
		newer := w.send("POST", "/gate", `"stubborn"`, entry7, token(6))
		if h := w.health(); h.Active != 2 {
			t.Errorf("the new attempt did not start a run of its own: %+v", h)
		}
		w.open("stubborn")
		w.open("stubborn")
		w.expect(newer.answer(), 200, "success")
	})
}

func TestRunOutlivesOneOfTwoWaiters(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		a := w.send("POST", "/gate", `"a"`, "Idempotency-Key: k")
		b := w.send("POST", "/gate", `"a"`, "Idempotency-Key: k")
		a.hangUp()
		w.open("a")
		w.expect(b.answer(), 200, "success")
	})
}

func TestIdempotencyKeyGivesOneJob(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		first := w.post("/gate?async=true", `"a"`, "Idempotency-Key: k")
		again := w.post("/gate?async=true", `"a"`, "Idempotency-Key: k")
		if again.JobID != first.JobID {
			t.Errorf("first %+v, again %+v", first, again)
		}
		other := w.post("/gate?async=true", `"b"`, "Idempotency-Key: k")
		if other.Code != 422 || other.Field != "Idempotency-Key" {
			t.Errorf("same key, other payload: %+v", other)
		}
		alone := w.post("/gate?async=true", `"a"`)
		if alone.JobID == "" || alone.JobID == first.JobID {
			t.Errorf("without a key: %+v", alone)
		}
		w.open("a")
		w.open("a")
	})
}

func TestFenceRemembersItsLastEntriesInBoundedMemory(t *testing.T) {
	const limit = 8
	rapid.Check(t, func(t *rapid.T) {
		f := newFence(limit)
		highest := map[string]uint64{}
		var recent []string // distinct entries, latest last
		for range rapid.IntRange(0, 200).Draw(t, "calls") {
			entry := fmt.Sprint(rapid.IntRange(0, 30).Draw(t, "entry"))
			token := rapid.Uint64Range(1, 20).Draw(t, "token")
			err := f.observe(entry, token)
			known := slices.Contains(recent[max(0, len(recent)-(limit-1)):], entry)
			if known && (err != nil) != (token < highest[entry]) {
				t.Fatalf("entry %s token %d after %d: %v", entry, token, highest[entry], err)
			}
			if err == nil {
				highest[entry] = token
				recent = append(slices.DeleteFunc(recent, func(e string) bool { return e == entry }), entry)
			}
			if size := len(f.young) + len(f.old); size > 2*limit {
				t.Fatalf("%d entries remembered, want at most %d", size, 2*limit)
			}
		}
	})
}
