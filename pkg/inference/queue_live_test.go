package inference

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// The project's own worker, unmodified, behind a queue.
func TestLongLiveWorkerBehindTheQueue(t *testing.T) {
	if testing.Short() {
		t.Skip("not run: -short")
	}
	binary := workertest.BuildExample(t)
	start := func(t *testing.T, model worker.Model, path string, args ...string) (*bed, string) {
		t.Helper()
		b := newBed(t, model)
		url, _ := workertest.StartProcess(t, binary, append([]string{
			"--listen", "127.0.0.1:0", "--models", strings.Trim(path, "/"), "--slots", "2",
		}, args...)...)
		workertest.WaitFor(t, func() bool { return b.workerHealth(url).Max == 2 })
		b.instance("cpu-1", url+path, 2)
		return b, url
	}

	t.Run("texts", func(t *testing.T) {
		b, _ := start(t, worker.Model{}, "/language")
		b.start(ServiceConfig{})
		ids := b.push(`{"text":"Bonjour tout le monde, comment allez-vous"}`, `{"txt":1}`)
		if o := b.outcome(ids[0]); !strings.Contains(string(o.Result), `"language": "fr"`) {
			t.Errorf("outcome %+v: %s", o, o.Result)
		}
		if o := b.outcome(ids[1]); o.Outcome != "failed" || o.Class != "input" {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("runs are followed on", func(t *testing.T) {
		// Two runs are seen at once however busy the machine is.
		b, url := start(t, asyncModel(), "/echo", "--async", "echo", "--delay", "4s")
		ids := b.push(empty(4)...)
		first := b.start(ServiceConfig{})
		workertest.WaitFor(t, func() bool { return b.count(`SELECT count(*) FROM penstock.remote_run`) == 2 })
		first.die()
		b.start(ServiceConfig{})
		for _, id := range ids {
			if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
				t.Fatalf("outcome %+v", o)
			}
		}
		if h := b.workerHealth(url); h.Completed != 4 {
			t.Errorf("the worker ran %d calls for 4 entries", h.Completed)
		}
	})
	t.Run("cancel frees the worker", func(t *testing.T) {
		b, url := start(t, asyncModel(), "/echo", "--async", "echo", "--delay", "1h")
		b.start(ServiceConfig{})
		id := b.push(`{}`)[0]
		workertest.WaitFor(t, func() bool { return b.workerHealth(url).Active == 1 })
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, id)
		b.must(err)
		if o := b.outcome(id); o.Outcome != "cancelled" || !strings.Contains(o.Reason, "worker confirmed") {
			t.Errorf("outcome %+v", o)
		}
		if h := b.workerHealth(url); h.Active != 0 {
			t.Errorf("the worker still runs %d calls", h.Active)
		}
	})
}

type workerHealth struct {
	Active    int `json:"active_jobs"`
	Max       int `json:"max_jobs"`
	Completed int `json:"completed"`
}

func (b *bed) workerHealth(url string) (h workerHealth) {
	b.Helper()
	req, err := http.NewRequestWithContext(b.ctx, http.MethodGet, url+"/health", nil)
	b.must(err)
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return h
	}
	defer reply.Body.Close()
	_ = json.NewDecoder(reply.Body).Decode(&h) // not ready yet: zero
	return h
}

// A Cog-protocol server around tesseract, which reports to callbacks. Its caller dies; the report reaches the node that
// follows the run on, through whatever process the address leads to.
func TestLongLiveCogReportsToTheNodeThatFollowsOn(t *testing.T) {
	server := workertest.StartCog(t, 1)
	b := newBed(t, worker.Model{
		Name: "ocr", Protocol: worker.ProtocolCog, Type: worker.TypeAsync,
		PollInterval: worker.Seconds(50 * time.Millisecond),
	})
	b.instance("cpu-1", server.URL, 1)

	// One address for all nodes, as behind a load balancer: here it leads to a process that runs nothing itself.
	var front atomic.Pointer[Reports]
	address := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { takeAt(front.Load(), w, r) }))
	t.Cleanup(address.Close)
	newReports := func() *Reports {
		return NewReports(address.URL, []byte("key of the installation"), b.pool, quiet)
	}
	front.Store(newReports())
	config := func() ServiceConfig { return ServiceConfig{Reports: newReports()} }

	first := b.start(config())
	id := b.push(fmt.Sprintf(`{"image": %q, "pages": 12}`, workertest.Picture(t, "HELLO")))[0]
	workertest.WaitFor(t, func() bool {
		return b.count(`SELECT count(*) FROM penstock.remote_run WHERE remote_id IS NOT NULL`) == 1
	})
	first.die()
	b.start(config())
	o := b.outcome(id)
	if o.Outcome != "done" || !strings.Contains(string(o.Result), "HELLO") || o.Attempt != 0 {
		t.Fatalf("outcome %+v: %s", o, o.Result)
	}
	if server.Started() != 1 {
		t.Errorf("the prediction ran %d times", server.Started())
	}
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
}
