package inference

import (
	"testing"

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
