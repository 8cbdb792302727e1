package invalidation

import (
	"encoding/json"
	"errors"
	"testing"
)

// On a disk that is full a push that is refused writes nothing: a transaction that has written has an id.
func TestARefusedPushWritesNothing(t *testing.T) {
	b := newBed(t, Config{})
	body := json.RawMessage(`{}`)
	once := b.pushAll(b.pool, Push{Payload: body, IdempotencyKey: "once"})[0]
	holder := b.pushAll(b.pool, Push{Payload: body, UniqueKey: "held", UniquePolicy: WhileQueued})[0]
	b.exec(b.pool, `UPDATE penstock.queue SET refusal = '{"reason": "storage", "text": "the disk is full"}' WHERE id = $1`, b.q.ID)
	for option, p := range map[string]Push{
		"no option":       {},
		"idempotency_key": {IdempotencyKey: "new"},
		"unique_key":      {UniqueKey: "new", UniquePolicy: WhileQueued},
		"both":            {IdempotencyKey: "new", UniqueKey: "new", UniquePolicy: WhileQueued},
		"flow":            {Flow: "a", IdempotencyKey: "once"},
	} {
		p.Payload = body
		tx := b.begin()
		attempt, err := tx.Begin(b.ctx)
		b.must(err)
		if _, err := b.q.WithTx(attempt).Push(b.ctx, p); !errors.Is(err, ErrQueueFull) {
			t.Errorf("%s: the push answered %v, want ErrQueueFull", option, err)
		}
		b.must(attempt.Rollback(b.ctx))
		var wrote bool
		b.must(tx.QueryRow(b.ctx, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`).Scan(&wrote))
		if wrote {
			t.Errorf("%s: the push wrote before it was refused", option)
		}
		b.must(tx.Rollback(b.ctx))
	}
	b.want(b.pushAll(b.pool, Push{Payload: body, IdempotencyKey: "once"}), []EntryID{once})
	b.want(b.pushAll(b.pool, Push{Payload: body, UniqueKey: "held", UniquePolicy: WhileQueued}), []EntryID{holder})
	if _, err := b.q.Push(b.ctx, Push{Payload: body, IdempotencyKey: "once"}, Push{Payload: body, IdempotencyKey: "new"}); !errors.Is(err, ErrQueueFull) {
		t.Errorf("a new entry beside one that was accepted: %v, want ErrQueueFull", err)
	}
}

// The sample that a refusal reads may be from before the queue filled. The push was then told that the queue is full of
// two entries.
func TestARefusalForTheDepthNamesNoSmallerOne(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	b.exec(b.pool, `INSERT INTO penstock.sample SELECT (s.m).* FROM (SELECT penstock.measure(q) m FROM penstock.queue q WHERE id = $1) s`, b.q.ID)
	b.exec(b.pool, `UPDATE penstock.queue SET refusal = '{"reason": "depth", "capacity": 40, "release": 38}' WHERE id = $1`, b.q.ID)
	_, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
	var refused *FullError
	if !errors.As(err, &refused) || refused.Capacity != 40 || refused.Depth < 38 {
		t.Errorf("the push answered %v, want a depth from which it is refused", err)
	}
}
