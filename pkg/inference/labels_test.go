package inference

import (
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

// An entry that no instance can take, or only one that takes no calls, must not keep an idle slot from the others.
func TestEntryThatFindsNoInstanceKeepsNoSlot(t *testing.T) {
	for name, labels := range map[string]string{"that there is": "h100", "that takes calls": "a100"} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{LabelsField: "on", AffinityField: "lora", AffinityWait: worker.Seconds(time.Minute)})
			w := workertest.NewScript(t, healthy(workertest.Says(200, `{"status":"success","result":1}`)))
			for server, gpu := range map[string]string{"small": "t4", "large": "a100"} {
				_, err := RegisterInstance(b.ctx, b.pool, b.model.Name, server, w.URL, 1, map[string]string{"gpu": gpu}, By{})
				b.must(err)
			}
			b.must(DrainInstance(b.ctx, b.pool, b.model.Name, "large", By{}))
			waits := b.push(`{"on":{"gpu":"` + labels + `"}}`)[0]
			m := b.start(ServiceConfig{})
			b.await(0, `SELECT count(*) FROM penstock.ready`)
			other := b.push(`{}`)[0]
			b.await(1, `SELECT count(*) FROM penstock.result WHERE entry_id = $1`, other) // it gets the slot that idles
			m.leave()
			_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'test')`, waits)
			b.must(err)
		})
	}
}
