package batch

import (
	"encoding/json"
	"testing"
	"time"
)

// The end of each part, and of each completion entry, is that of one run: entries that are merged into another one have
// no run. A name that no open batch has is no obstacle.
func TestEntriesOfBatchesAreNotMerged(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('parts', '{"grouping": "customer", "mergeable": true}')`)
	b.exec(`SELECT penstock.create_queue('ends', '{"grouping": "customer", "mergeable": true}')`)
	detail := json.RawMessage(`{"customer": "c7"}`)
	id := b.create(Batch{Items: numbers(20), PartSize: 1, Detail: detail, CompletionQueue: "ends"})
	other := b.create(Batch{Items: numbers(1), PartSize: 1, Detail: detail, CompletionQueue: "ends"})
	merged := func(queue string) int {
		return b.count(`SELECT penstock.compact($1, 'c7')`, queue)
	}
	b.step()
	if n := merged("parts"); n != 0 {
		t.Errorf("%d parts were merged into others", n)
	}
	b.drainParts(id, other)
	if s := b.status(id); len(b.mapped) != 21 || s.Bad != 0 {
		t.Errorf("Map ran %d times for 21 parts, %+v", len(b.mapped), s)
	}
	if n := merged("ends"); n != 0 {
		t.Errorf("%d completion entries were merged into others", n)
	}
	b.exec(`SELECT penstock.push('ends', '{"customer": "c7"}', name => 'batch:4711') FROM generate_series(1, 3)`)
	if n := merged("ends"); n != 2 {
		t.Errorf("merged %d entries that belong to no batch, want 2", n)
	}
}

// drainParts lets leader and node work until the batches wait for their completion entries.
func (b *bed) drainParts(ids ...int64) {
	b.Helper()
	const open = `SELECT count(*) FROM penstock.batch WHERE id = ANY ($1) AND status <> 'ending'`
	for began := time.Now(); time.Since(began) < time.Minute; {
		b.step()
		if b.run(100) == 0 && b.count(open, ids) == 0 {
			return
		}
	}
	b.Fatal("the parts do not come to an end")
}
