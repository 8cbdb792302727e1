package openaibatch

import (
	"encoding/json"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// While a queue is full what has ended is collected, and as much is fed as there is room for.
func TestBatchOnAFullQueueIsCollected(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	const text = `{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}` + "\n"
	b := s.create(s.file(text + text + text + text))
	s.exec(`SELECT penstock.create_queue('q', '{"capacity": 3}')`)
	q, err := invalidation.Open(t.Context(), s.pool, "q")
	if err != nil {
		t.Fatal(err)
	}
	usual := invalidation.Push{Payload: json.RawMessage(`{}`)}
	pushed, err := q.Push(t.Context(), usual, usual, usual)
	if err != nil {
		t.Fatal(err)
	}
	cancel := func(i int) { s.exec(`SELECT penstock.cancel_entry($1, 'test', 'test')`, int64(pushed[i].ID)) }
	s.exec(`UPDATE penstock.gateway_batch SET status = 'in_progress', total = 4, fed = 1, model = 'm',
	               queue_id = (SELECT id FROM penstock.queue WHERE name = 'q')`)
	for i := range 4 {
		s.exec(`INSERT INTO penstock.gateway_batch_line (batch_id, line, at, bytes, custom_id) VALUES ($1, $2, $3, $4, 'a')`,
			b.ID, i+1, i*len(text), len(text))
	}
	cancel(0) // it is the entry of the first line; another push takes its room
	s.exec(`UPDATE penstock.gateway_batch_line SET entry_id = $1 WHERE line = 1`, int64(pushed[0].ID))
	if _, err := q.Push(t.Context(), usual); err != nil {
		t.Fatal(err)
	}
	s.step1(b)
	if b = s.again(b); b.Failed != 1 || b.Fed != 1 || b.FailedTurns != 0 {
		t.Errorf("%d lines were collected and %d fed after %d failures, want 1, 1, 0", b.Failed, b.Fed, b.FailedTurns)
	}
	cancel(1)
	s.step1(b)
	if b = s.again(b); b.Fed != 2 {
		t.Errorf("%d lines are fed, want 2: there is room for one", b.Fed)
	}
}
