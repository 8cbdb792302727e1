package e2e_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/worker"
)

// failingCallsMax is how many calls a worker that only fails may cost before its instance is taken out, however many
// nodes call it.
const failingCallsMax = 10

// Two nodes share three instances of a model, one of which answers every call with 500. It is quarantined before it has
// cost ten calls, and no entry spends an attempt on it.
func TestAFailingWorkerIsTakenOutBeforeItsTenthCall(t *testing.T) {
	t.Parallel()
	const entries = 600
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	var failed atomic.Int64
	workerOf := func(answer http.HandlerFunc) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if r.Method != http.MethodPost {
				fmt.Fprint(w, `{"status": "ok"}`)
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			time.Sleep(20 * time.Millisecond) // as long as a short run takes
			answer(w, r)
		}))
		t.Cleanup(s.Close)
		return s.URL + "/run"
	}
	good := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"status": "success", "result": 1}`) }
	queue := p.register(worker.Model{Name: "m"}, 4, workerOf(good))
	for name, answer := range map[string]http.HandlerFunc{
		"good": good,
		"failing": func(w http.ResponseWriter, _ *http.Request) {
			failed.Add(1)
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, `{"error": "internal error"}`)
		},
	} {
		_, err := inference.RegisterInstance(t.Context(), p.pool, "m", name, workerOf(answer), 4, nil,
			inference.By{Actor: "operator"})
		p.must(err)
	}
	for _, name := range []string{"node_a", "node_b"} {
		p.startNode(name)
	}
	p.push(queue, entries)
	var atQuarantine int64
	eventually(t, time.Minute, "the failing instance is quarantined", func() bool {
		out := p.query(`SELECT count(*) FROM penstock.instance WHERE server = 'failing' AND quarantined_until IS NOT NULL`)
		atQuarantine = failed.Load()
		return out == 1
	})
	eventually(t, 2*time.Minute, "all entries are done", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`) == entries
	})
	t.Logf("the failing worker was called %d times before its instance was taken out, %d times in all", atQuarantine, failed.Load())
	if atQuarantine >= failingCallsMax {
		t.Errorf("the failing worker cost %d calls, want fewer than %d", atQuarantine, failingCallsMax)
	}
	if spent := p.query(`SELECT count(*) FROM penstock.result WHERE attempt > 0`); spent > 0 {
		t.Errorf("%d of %d entries spent an attempt on the failing worker", spent, entries)
	}
}
