package e2e_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/pkg/worker"
)

// countingWorker counts the calls of each entry and answers each after a time.
type countingWorker struct {
	*httptest.Server
	mu      sync.Mutex
	calls   map[string]int
	dropped int // calls whose connection was closed before they were answered
}

func newCountingWorker(t *testing.T, run time.Duration) *countingWorker {
	t.Helper()
	w := &countingWorker{calls: map[string]int{}}
	w.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(rw, `{"status": "ok"}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.mu.Lock()
		w.calls[r.Header.Get("Penstock-Entry")]++
		w.mu.Unlock()
		select {
		case <-time.After(run):
			_, _ = io.WriteString(rw, `{"status": "success", "result": 1}`)
		case <-r.Context().Done():
			w.mu.Lock()
			w.dropped++
			w.mu.Unlock()
		}
	}))
	t.Cleanup(func() { w.CloseClientConnections(); w.Close() })
	return w
}

// count returns how many entries were called for, how many calls there were, and how many of these were dropped.
func (w *countingWorker) count() (entries, calls, dropped int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.calls {
		calls += n
	}
	return len(w.calls), calls, w.dropped
}

// outage is how long the database is away: PENSTOCK_OUTAGE, such as 30s, or 8 s. Leases and runs are scaled by it.
func outage(t *testing.T) (away, lease, run time.Duration) {
	t.Helper()
	away = 8 * time.Second
	if text := os.Getenv("PENSTOCK_OUTAGE"); text != "" {
		var err error
		if away, err = time.ParseDuration(text); err != nil {
			t.Fatalf("PENSTOCK_OUTAGE: %v", err)
		}
	}
	return away, min(away/2, 10*time.Second), 2*away - time.Second
}

// Calls of a model outlast an outage of the database that is longer than every lease: each is made once.
func TestRunningCallsGoThroughAnOutageOfTheDatabase(t *testing.T) {
	away, lease, run := outage(t)
	for _, how := range []devpostgres.Signal{devpostgres.Fast, devpostgres.Crash} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			const calls = 32
			p := newPlant(t, 1, worker.Model{Name: "echo"})
			w := newCountingWorker(t, run)
			queue := p.register(worker.Model{Name: "counted"}, calls, w.URL+"/run")
			for _, name := range []string{"node_a", "node_b"} {
				p.startNode(name, "--lease", lease.String(), "--beat", (lease / 5).String())
			}
			p.push(queue, calls)
			eventually(t, time.Minute, "all calls run", func() bool { n, _, _ := w.count(); return n == calls })
			// Their tokens are listed, as those of calls that have run for a while are.
			eventually(t, time.Minute, "heartbeats list all calls", func() bool {
				return p.query(`SELECT sum(cardinality(running)) FROM penstock.node`) == calls
			})
			p.server.Stop(how)
			time.Sleep(away) // this is what is tested, not a wait for something
			p.server.Start()
			p.answers()
			p.ended(run + time.Minute)
			entries, made, dropped := w.count()
			t.Logf("%v without the database, calls of %v, lease %v: %d entries, %d calls, %d dropped", away, run, lease, entries, made, dropped)
			if made != calls || dropped != 0 {
				t.Errorf("%d calls for %d entries, %d of them dropped: want each made once", made, calls, dropped)
			}
			if n := p.query(`SELECT count(*) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id WHERE s.doubt_at IS NOT NULL`); n != 0 {
				t.Errorf("%d slots are in doubt", n)
			}
			p.eachDoneOnce()
			p.spent(0)
			p.push(queue, 1) // and the nodes are of use again
			eventually(t, time.Minute, fmt.Sprintf("call %d", calls+1), func() bool { n, _, _ := w.count(); return n == calls+1 })
		})
	}
}
