package webhook

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Nodes sign what is in the queue of callbacks with the secrets of receivers. Nobody but an ending puts anything there.
func TestNobodyPushesToTheQueueOfCallbacks(t *testing.T) {
	d := newFixture(t, atHome)
	forged := json.RawMessage(`{"url": "https://victim.example/hook", "type": "entry.done", "data": {"id": 1}}`)
	for name, pushes := range map[string][]invalidation.Push{
		"one": {{Payload: forged}}, "two": {{Payload: forged}, {Payload: forged}}, "with an option": {{Payload: forged, Flow: "f"}},
	} {
		if _, err := d.queue.Push(d.ctx, pushes...); !errors.Is(err, invalidation.ErrInvalid) {
			t.Errorf("push of %s from Go: %v", name, err)
		}
	}
	for _, sql := range []string{
		`SELECT penstock.push('webhook', '{"url": "https://victim.example/hook"}')`,
		`SELECT penstock.push_many('webhook', ARRAY['{}'::jsonb])`,
		`SELECT penstock.push_json('webhook', '[{"payload": {}}]')`,
		`SELECT penstock.create_queue('parts', '{"kind": "batch"}'), penstock.push('parts', '{"batch": 1, "step": "part", "part": 1}')`,
		`SELECT penstock.create_queue('work'), penstock.create_batch('b', 'work', '{"items": [1], "completion_queue": "webhook"}')`,
	} {
		if _, err := d.pool.Exec(d.ctx, sql); err == nil {
			t.Errorf("%s is taken", sql)
		}
	}
	if n := d.count(`SELECT count(*) FROM penstock.entry`); n != 0 {
		t.Errorf("%d entries were pushed", n)
	}
	if n := d.count(`SELECT count(*) FROM penstock.queue WHERE name = 'webhook' AND application = 'penstock'`); n != 1 {
		t.Error("the queue of callbacks belongs to an application of users")
	}
}

// A client of a dispatcher asks for the body that it knows when it pushes.
func TestCallbackComesInTheFormatOfItsPush(t *testing.T) {
	d := newFixture(t, atHome)
	q, err := invalidation.Create(d.ctx, d.pool, "work", invalidation.Config{})
	d.must(err)
	_, err = q.Push(d.ctx, invalidation.Push{Payload: json.RawMessage(`{}`), Callback: json.RawMessage(`{"url": "https://a.example/", "format": "xml"}`)})
	if !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("format xml: %v", err)
	}
	_, err = q.Push(d.ctx, invalidation.Push{Payload: json.RawMessage(`{}`), Callback: json.RawMessage(`{"url": "` + d.receiver.URL + `", "format": "job"}`)})
	d.must(err)
	lock := d.claim(q, "")
	ending := invalidation.Done(lock, lock.Entries[0].ID, json.RawMessage(`{"faces": 2}`), time.Second)
	ending.Last = true
	_, err = q.Settle(d.ctx, 1, []invalidation.Ending{ending})
	d.must(err)
	d.must(d.deliver())
	var body struct {
		ID     string `json:"job_id"`
		Status string
		Result map[string]int
	}
	d.must(json.Unmarshal(d.body, &body))
	if body.ID == "" || body.Status != "completed" || body.Result["faces"] != 2 {
		t.Errorf("receiver was told %s", d.body)
	}
}
