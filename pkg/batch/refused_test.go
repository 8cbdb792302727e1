package batch

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

var by = invalidation.By{Actor: "ada", Reason: "test"}

// A push that is refused for good ends the parts that wait for it, and the batch: a later step would be refused again.
func TestPartsWhosePushIsRefusedForGoodAreFailed(t *testing.T) {
	for name, c := range map[string]struct{ detail, setting, undone, problem string }{
		"too large":        {`{"text": "` + strings.Repeat("x", 300) + `"}`, `{"payload_limit": 200}`, `{"payload_limit": 2000}`, "bytes"},
		"no valid options": {`{"customer": ""}`, `{"grouping": "customer"}`, `{"grouping": null}`, "lock_key is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			id := b.create(Batch{Items: numbers(5), PartSize: 1, Window: 2, Detail: json.RawMessage(c.detail), CompletionQueue: "parts"})
			b.step()
			b.exec(`SELECT penstock.alter_queue('parts', '` + c.setting + `')`)
			b.drain()
			s := b.status(id)
			if s.State != "failed" || s.Done != 2 || s.Bad != 3 ||
				!strings.Contains(s.Problem, "parts cannot be pushed") || !strings.Contains(s.Problem, c.problem) ||
				!strings.Contains(s.Problem, "; completion: ") {
				t.Errorf("%+v, want 2 parts done, 3 failed, and the refusals of parts and completion as problem", s)
			}
			if n := b.count(`SELECT count(*) FROM penstock.batch_part WHERE error LIKE '%' || $1 || '%'`, c.problem); n != 3 {
				t.Errorf("%d parts have the refusal as error, want 3", n)
			}
			b.exec(`SELECT penstock.alter_queue('parts', '` + c.undone + `')`)
			if err := Retry(b.ctx, b.pool, id, by); err != nil {
				t.Fatal(err)
			}
			b.drain()
			if s := b.status(id); s.State != "done" || s.Done != 5 || s.Problem != "" || string(s.Result) != "15" {
				t.Errorf("retried where the push is taken: %+v", s)
			}
		})
	}
}

// A batch whose completion entry is refused can be cancelled, and ends.
func TestABatchEndsThoughItsCompletionIsRefused(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_queue('ends')`)
	detail := json.RawMessage(`{"text": "` + strings.Repeat("x", 300) + `"}`)
	done := b.create(Batch{Items: numbers(1), Detail: detail, CompletionQueue: "ends"})
	cancelled := b.create(Batch{Items: numbers(1), Detail: detail, CompletionQueue: "ends"})
	b.exec(`SELECT penstock.alter_queue('ends', '{"payload_limit": 200}')`)
	if err := Cancel(b.ctx, b.pool, cancelled, by); err != nil {
		t.Fatal(err)
	}
	b.drain()
	for id, state := range map[int64]string{done: "failed", cancelled: "cancelled"} {
		if s := b.status(id); s.State != state || !strings.HasPrefix(s.Problem, "completion: payload of entry 1 has") {
			t.Errorf("%+v, want it %s with the refusal as problem", s, state)
		}
	}
}

// What no push would take is refused when the batch is made.
func TestCreateRefusesADetailThatNoPushTakes(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('parts', '{"payload_limit": 200, "grouping": "customer"}')`)
	b.exec(`SELECT penstock.create_queue('ends', '{"grouping": "receiver"}')`)
	for name, c := range map[string]struct {
		batch Batch
		want  error
	}{
		"part too large":         {Batch{Items: numbers(1), Detail: json.RawMessage(`{"text": "` + strings.Repeat("x", 300) + `"}`)}, invalidation.ErrPayloadTooLarge},
		"part with an empty key": {Batch{Query: "SELECT 1", Detail: json.RawMessage(`{"customer": ""}`)}, invalidation.ErrInvalid},
		"completion":             {Batch{Items: numbers(1), Detail: json.RawMessage(`{"receiver": ""}`), CompletionQueue: "ends"}, invalidation.ErrInvalid},
	} {
		c.batch.Queue, c.batch.Name = "parts", name
		if _, err := Create(b.ctx, b.pool, c.batch, by); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	b.create(Batch{Items: numbers(0), Detail: json.RawMessage(`{"customer": ""}`)})
}

// An empty set has no parts, but a completion entry, which may fail as any.
func TestTheCompletionOfAnEmptyBatchIsRetried(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(0), CompletionQueue: "parts"})
	b.step()
	lock := b.claim(1)[0]
	e := invalidation.Fail(lock, lock.Entries[0].ID, invalidation.Failure{Error: "no"}, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "failed" {
		t.Fatalf("%+v, want it failed by its completion", s)
	}
	if err := Retry(b.ctx, b.pool, id, by); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "0" {
		t.Errorf("retried: %+v", s)
	}
	unsplit := b.create(Batch{Query: "SELECT * FROM nowhere"})
	b.drain()
	if err := Retry(b.ctx, b.pool, unsplit, by); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("retry of a batch that could not be split: %v", err)
	}
}

// A batch whose parts are done is not done without its completion, which can be cancelled, and run again.
func TestABatchWhoseCompletionDidNotRunIsFailed(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(2), PartSize: 1, CompletionQueue: "parts"})
	b.step()
	b.run(2)
	b.step()
	if err := Cancel(b.ctx, b.pool, id, by); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("cancel of a batch whose parts have ended: %v, want ErrState", err)
	}
	for verb, want := range map[string]string{
		`cancel_entry(id, 'not now', 'ada')`:                                          "completion: its entry was cancelled",
		`end_entry(penstock.take_entry(queue_id, id), 'expired', 'its time is over')`: "completion: its entry has expired: its time is over",
	} {
		b.exec(`SELECT penstock.` + verb + ` FROM penstock.entry WHERE payload->>'step' = 'end'`)
		b.step()
		if s := b.status(id); s.State != "failed" || s.Done != 2 || !strings.HasPrefix(s.Problem, want) {
			t.Errorf("%+v, want it failed: %s", s, want)
		}
		if err := Retry(b.ctx, b.pool, id, by); err != nil {
			t.Fatal(err)
		}
		b.step()
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "3" || len(b.mapped) != 2 {
		t.Errorf("retried: %+v, Map ran %d times, want 2", s, len(b.mapped))
	}
}

func TestARetriedBatchIsNotPaused(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(2), PartSize: 1})
	if err := errors.Join(Pause(b.ctx, b.pool, id, by, time.Time{}), Cancel(b.ctx, b.pool, id, by)); err != nil {
		t.Fatal(err)
	}
	for s := b.status(id); s.State != "cancelled"; s = b.status(id) {
		b.step()
	}
	if err := Retry(b.ctx, b.pool, id, by); err != nil {
		t.Fatal(err)
	}
	b.step()
	if s := b.status(id); s.State != "running" || s.Queued != 2 {
		t.Errorf("retried: %+v, want its parts in the queue", s)
	}
}

// A batch whose completion entry has no queue to go to is not done.
func TestTheCompletionQueueOfAnOpenBatchIsDroppedByForceAlone(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_queue('ends')`)
	running := b.create(Batch{Items: numbers(1), CompletionQueue: "ends"})
	ending := b.create(Batch{Items: numbers(0), CompletionQueue: "ends"})
	ended := b.create(Batch{Items: numbers(1), CompletionQueue: "parts"})
	b.step()
	if _, err := b.pool.Exec(b.ctx, `SELECT penstock.drop_queue('ends')`); postgres.Code(err) != "PS006" {
		t.Errorf("drop of a completion queue with an entry: %v", err)
	}
	b.exec(`DELETE FROM penstock.ready WHERE queue_id = (SELECT id FROM penstock.queue WHERE name = 'ends')`)
	b.exec(`DELETE FROM penstock.entry WHERE queue_id = (SELECT id FROM penstock.queue WHERE name = 'ends')`)
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.drop_queue('ends')`)
	if postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), "completion_queue of batch 1") {
		t.Errorf("drop of the completion queue of open batches: %v", err)
	}
	b.exec(`SELECT penstock.drop_queue('ends', true)`)
	b.drain()
	for _, id := range []int64{running, ending} {
		if s := b.status(id); s.State != "failed" || s.Problem != `completion: queue "ends" was dropped` {
			t.Errorf("%+v, want it failed since its completion queue was dropped", s)
		}
	}
	if s := b.status(ended); s.State != "done" {
		t.Errorf("%+v, want the batch of another completion queue done", s)
	}
	b.exec(`SELECT penstock.drop_queue('parts', true)`)
}
