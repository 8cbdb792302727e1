package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// pushPayloads pushes one entry of lock key K for each payload.
func (b *bed) pushPayloads(payloads ...string) []EntryID {
	b.Helper()
	pushes := make([]Push, len(payloads))
	for i, p := range payloads {
		pushes[i] = Push{LockKey: "K", Payload: json.RawMessage(p)}
	}
	return b.pushAll(b.pool, pushes...)
}

func (b *bed) compact() int {
	b.Helper()
	n, err := b.q.Compact(b.ctx, "K")
	b.must(err)
	return n
}

func TestCompactMergesByTheRule(t *testing.T) {
	for rule, want := range map[string]string{
		"first":  `{"a":1,"b":1}`,
		"last":   `{"a":3}`,
		"object": `{"a":3,"b":1,"c":2}`,
		"array":  `[{"a":1,"b":1},{"a":2,"c":2},{"a":3}]`,
	} {
		t.Run(rule, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true, Merge: rule})
			ids := b.pushPayloads(`{"a": 1, "b": 1}`, `{"a": 2, "c": 2}`, `{"a": 3}`)
			b.want(b.compact(), 2)
			for _, id := range ids[1:] {
				e := b.outcome(id)
				b.want([]string{e.Outcome, e.Reason}, []string{"done", fmt.Sprint("merged into ", ids[0])})
			}
			lock := b.claimOne()
			b.want(entryIDs(lock), ids[:1])
			b.want(lock.Entries[0].Payload, json.RawMessage(want))
		})
	}
}

func TestCompactingAgainMergesTheSame(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	b.pushPayloads(`1`, `2`)
	b.want(b.compact(), 1)
	b.pushPayloads(`3`, `[4, 5]`)
	b.want(b.compact(), 2)
	b.want(b.compact(), 0)
	b.want(b.claimOne().Entries[0].Payload, json.RawMessage(`[1,2,3,4,5]`))
}

func TestCompactLeavesAloneWhatANodeWasHanded(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	handed := b.pushPayloads(`1`, `2`)
	lock := b.claimOne()
	behind := b.pushPayloads(`3`, `4`, `5`)
	b.want(b.compact(), 2)
	b.want(entryIDs(lock), handed)
	b.settle(doneAll(lock)...)
	next := b.claimOne()
	b.want(entryIDs(next), behind[:1])
	b.want(next.Entries[0].Payload, json.RawMessage(`5`))
	for _, id := range handed {
		b.want(b.outcome(id).Reason, "")
	}
}

func TestCompactKeepsTheLatestDeadlineAndOwedCallbacks(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	soon, late := time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	ids := b.pushAll(b.pool, Push{LockKey: "K", FinishBy: soon}, Push{LockKey: "K", FinishBy: late},
		Push{LockKey: "K", Callback: json.RawMessage(`{"url": "https://example.com"}`)}, Push{LockKey: "K"}, Push{LockKey: "K", StartBy: late})
	b.want(b.compact(), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND finish_by = $2`, ids[0], late), 1)
	b.want(b.compact(), 1) // the run behind the callback; it has no deadline, since one of it has none
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND start_by IS NULL`, ids[3]), 1)
	b.want(entryIDs(b.claim(1)...), []EntryID{ids[0], ids[2], ids[3]})
}

func TestCompactStaysWithinThePayloadLimit(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array", PayloadLimit: 200})
	b.pushPayloads(`"`+string(make100())+`"`, `"`+string(make100())+`"`, `1`, `2`)
	b.want(b.compact(), 2) // the second takes both numbers, the first is alone
	b.want(b.compact(), 0)
	b.want(len(b.claimOne().Entries), 2)
}

// An entry that cannot be merged is left where it is, and the rest of its key and queue is merged all the same. What is
// stored is compressed; the limit is for payloads as they are read.
func TestCompactPassesByWhatCannotBeMerged(t *testing.T) {
	large := func(c string) string { return `"` + strings.Repeat(c, 200_000) + `"` }
	for name, c := range map[string]struct {
		rule     string
		payloads []string
		limit    int // set once all are pushed
		replaced int
	}{
		"larger than the limit when uncompressed": {"array", []string{large("x"), large("y"), `1`, `2`}, 0, 2},
		"no object":                                  {"object", []string{`{"a": 1}`, `[1]`, `{"a": 2}`, `{"b": 3}`}, 0, 1},
		"more than are merged at once":               {"object", append(slices.Repeat([]string{`1`}, 1100), `{"a": 1}`, `{"a": 2}`, `{"b": 3}`), 0, 2},
		"alone larger than a limit that was lowered": {"last", []string{`1`, large("x"), `2`, `3`}, 1000, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true, Merge: c.rule, PayloadLimit: 262144})
			b.pushPayloads(c.payloads...)
			for _, key := range []string{"A", "A", "Z", "Z"} {
				b.pushAll(b.pool, Push{LockKey: key, Payload: json.RawMessage(`{"v": 1}`)})
			}
			if c.limit > 0 {
				b.exec(b.pool, `UPDATE penstock.queue SET payload_limit = $1 WHERE name = 'work'`, c.limit)
			}
			n, next, err := b.q.CompactQueue(b.ctx, 2, 200, "")
			b.must(err)
			b.want([]any{n, next}, []any{c.replaced + 2, ""})
		})
	}
}

func TestCompactQueueVisitsAtMost1000Keys(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	keys := make([]string, 1100)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%04d", i)
	}
	b.push(keys...)
	_, after, err := b.q.CompactQueue(b.ctx, 2, 5000, "")
	b.must(err)
	b.want(after, "k0999")
}

func make100() []byte {
	b := make([]byte, 100)
	for i := range b {
		b[i] = byte('a' + i%26)
	}
	return b
}

func TestCompactRefusesAQueueThatIsNotMergeable(t *testing.T) {
	b := newControlBed(t, Config{})
	if _, err := b.q.Compact(b.ctx, "K"); !errors.Is(err, ErrState) {
		t.Errorf("compact of a queue that is not mergeable: %v", err)
	}
}

func TestCompactWithUsesTheCallersMerge(t *testing.T) {
	b := newControlBed(t, Config{})
	b.pushPayloads(`1`, `2`, `3`)
	broken := errors.New("cannot merge")
	if _, err := b.q.CompactWith(b.ctx, "K", func([]Entry) (json.RawMessage, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("compact with a merge that fails: %v", err)
	}
	n, err := b.q.CompactWith(b.ctx, "K", func(entries []Entry) (json.RawMessage, error) {
		sum := 0
		for _, e := range entries {
			var v int
			if err := json.Unmarshal(e.Payload, &v); err != nil {
				return nil, err
			}
			sum += v
		}
		return json.Marshal(sum)
	})
	b.must(err)
	b.want(n, 2)
	b.want(b.claimOne().Entries[0].Payload, json.RawMessage(`6`))
}

func TestCompactQueueVisitsKeysWithManyEntries(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	b.push("A", "B", "B", "C", "C", "C", "D", "D", "D")
	n, after, err := b.q.CompactQueue(b.ctx, 3, 3, "")
	b.must(err)
	b.want([]any{n, after}, []any{2, "C"})
	n, after, err = b.q.CompactQueue(b.ctx, 3, 3, after)
	b.must(err)
	b.want([]any{n, after}, []any{2, ""})
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 5)
}

// A loop ends at a depth; neither compaction nor a retry of what it ended in may begin it anew.
func TestDepthIsKeptByCompactionAndByRetryOfAFailure(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	ids := b.pushPayloads(`1`, `2`, `3`)
	b.exec(b.pool, `UPDATE penstock.entry SET depth = 7 WHERE id = $1`, ids[1])
	b.want(b.compact(), 2)
	b.want(b.count(`SELECT depth FROM penstock.entry WHERE id = $1`, ids[0]), 7)
	lock := b.claimOne()
	b.settle(last(Fail(lock, ids[0], Failure{Error: "no"}, 0)))
	b.exec(b.pool, `SELECT penstock.retry_failure($1)`, ids[0])
	b.want(b.count(`SELECT depth FROM penstock.entry WHERE id = $1`, ids[0]), 7)
}
