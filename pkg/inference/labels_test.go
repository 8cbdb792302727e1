package inference

import (
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestEntriesGoToInstancesWithTheLabelsThatTheyAskFor(t *testing.T) {
	b := newBed(t, worker.Model{LabelsField: "on"})
	for server, gpu := range map[string]string{"small": "t4", "large": "h100"} {
		w := workertest.NewScript(t, healthy(workertest.Says(200, `{"status":"success","result":"`+server+`"}`)))
		_, err := RegisterInstance(b.ctx, b.pool, b.model.Name, server, w.URL, 2, map[string]string{"gpu": gpu, "zone": "a"}, By{})
		b.must(err)
	}
	b.start(ServiceConfig{})
	var large []invalidation.EntryID
	for range 20 {
		large = append(large, b.push(`{"on":{"gpu":"h100","zone":"a"}}`)...)
	}
	any := b.push(`{}`)[0]
	nowhere := b.push(`{"on":{"gpu":"b200"}}`)[0]
	for _, id := range large {
		if o := b.outcome(id); string(o.Result) != `"large"` || o.Attempt != 0 {
			t.Errorf("ran on %s, %+v", o.Result, o)
		}
	}
	b.outcome(any)
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND attempt = 0`, nowhere); n != 1 {
		t.Error("an entry that no instance can take has ended, or spent attempts")
	}
}

// A server in which calls wait, or whose cache is nearly full, gets calls only where there is no other.
func TestPressedInstanceIsPassedOver(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI, LoadPath: "/metrics"})
	calls := map[string]*workertest.Script{}
	for server, metrics := range map[string]string{
		"free": "vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.4\n", "full": "vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.97\n",
		"waiting": "vllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc 0.4\n",
	} {
		w := workertest.NewScript(t, func(rw http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Path == "/metrics":
				workertest.Says(200, metrics)(rw, r)
			case r.Method == http.MethodGet:
				workertest.Says(200, ``)(rw, r)
			default:
				time.Sleep(5 * time.Millisecond)
				workertest.Says(200, `{"choices":[]}`)(rw, r)
			}
		})
		b.instance(server, w.URL, 4)
		calls[server] = w
	}
	n := b.start(ServiceConfig{})
	workertest.WaitFor(t, func() bool { return len(n.Registry.Pressed()) == 2 })
	for range 30 {
		b.outcome(b.push(`{"messages":[]}`)[0])
	}
	// A node holds slots in blocks, which may be of pressed instances alone for a moment.
	if free, full, waiting := posts(calls["free"]), posts(calls["full"]), posts(calls["waiting"]); free < 20 {
		t.Errorf("%d calls to the free instance, %d to the full one, %d to the one in which calls wait", free, full, waiting)
	}
}
