package invalidation

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Guard: compactable leaves out entries whose cancel is requested. What would be merged into one would be cancelled with
// it, and one that would be merged would run after all.
func TestCompactLeavesOutEntriesToBeCancelled(t *testing.T) {
	for name, handed := range map[string][]string{"oldest": {`1`}, "in the middle": {`1`, `2`}} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
			ids := b.pushPayloads(handed...)
			lock := b.claimOne()
			ids = append(ids, b.pushPayloads(`3`, `4`)...)
			asked := len(handed) - 1
			b.want(b.cancel(ids[asked]), cancelRequested)
			b.settle(releaseAll(lock)...)
			b.want(b.compact(), len(ids)-2)
			n, err := b.q.SettleCancelRequests(b.ctx, 10)
			b.must(err)
			b.want(n, 1)
			b.want(b.outcome(ids[asked]).Outcome, "cancelled")
			left := map[string]string{"oldest": `[3,4]`, "in the middle": `[1,3,4]`}[name]
			b.want(b.claimOne().Entries[0].Payload, json.RawMessage(left))
		})
	}
}

// Guard: await_compaction. A cancel that meets a compaction waits for its end: the answer is true of what the entry is then.
func TestCancelWaitsForACompactionOfTheKey(t *testing.T) {
	for name, c := range map[string]struct{ asked, left int }{"of the oldest": {0, 0}, "of a merged one": {1, 1}} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
			b.exec(b.pool, `ALTER FUNCTION penstock.await_compaction SET lock_timeout = 0`) // not 3 s
			ids := b.pushPayloads(`1`, `2`, `3`)
			compaction := b.begin()
			b.exec(compaction, `SELECT penstock.compact('work', 'K')`)
			answer := later(b, func() (error, error) {
				_, err := cancelEntry(b.ctx, b.pool, ids[c.asked], ann)
				return err, nil
			})
			b.awaitBlocked(compaction)
			b.commit(compaction)
			if err := answer(); (c.asked == 0) != (err == nil) || err != nil && !errors.Is(err, ErrState) {
				t.Errorf("cancel %s: %v", name, err)
			}
			// The compaction's session gives its locks back one after another. Where the cancel meets the lock of the
			// key's claims before it is free, it is a request, and ends the entry in the next pass.
			_, err := b.q.SettleCancelRequests(b.ctx, 10)
			b.must(err)
			b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
			b.want(b.count(`SELECT count(*) FROM penstock.entry`), c.left)
		})
	}
}

// Guard: a cancel keeps compactions of the key away until it commits, so that no compaction misses its request.
func TestCompactPassesByAKeyWithAnUncommittedCancel(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	ids := b.pushPayloads(`1`)
	lock := b.claimOne()
	b.pushPayloads(`2`, `3`)
	operatorTx := b.begin()
	answer, err := cancelEntry(b.ctx, operatorTx, ids[0], ann)
	b.must(err)
	b.want(answer, cancelRequested)
	b.settle(releaseAll(lock)...)
	b.want(b.compact(), 0)
	b.commit(operatorTx)
	b.want(b.compact(), 1)
	n, err := b.q.SettleCancelRequests(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want(b.claimOne().Entries[0].Payload, json.RawMessage(`[2,3]`))
}

// Cron jobs and bulk operations cancel what runs, whoever keeps the key.
func TestCancelOfARunningEntryIsRequestedAlthoughItsKeyIsKept(t *testing.T) {
	for name, keep := range map[string]string{
		"by a compaction": `SELECT penstock.compact('work', 'K')`,
		"by a session":    `SELECT penstock.exclude_claims((SELECT id FROM penstock.queue WHERE name = 'work'), 'K')`,
	} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true})
			ids := b.pushPayloads(`1`)
			b.claimOne()
			b.pushPayloads(`2`, `3`)
			b.exec(b.begin(), keep)
			cancelling := b.begin()
			b.exec(cancelling, `SET LOCAL lock_timeout = '1ms'`)
			answer, err := cancelEntry(b.ctx, cancelling, ids[0], ann)
			b.must(err)
			b.want(answer, cancelRequested)
		})
	}
}

// Guard: the lock of cancels of a key. A compaction that begins between the end of the one that a cancel met and the
// commit of that cancel would not see its request.
func TestCompactGivesWayToACancelThatMetAnotherCompaction(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	ids := b.pushPayloads(`1`)
	lock := b.claimOne()
	b.pushPayloads(`2`, `3`)
	compaction, cancelling := b.begin(), b.begin()
	b.exec(compaction, `SELECT penstock.compact('work', 'K')`)
	answer, err := cancelEntry(b.ctx, cancelling, ids[0], ann)
	b.must(err)
	b.want(answer, cancelRequested)
	b.commit(compaction)
	b.settle(releaseAll(lock)...)
	b.want(b.compact(), 0)
	b.commit(cancelling)
	b.pushPayloads(`4`)
	b.want(b.compact(), 1)
	n, err := b.q.SettleCancelRequests(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want(b.claimOne().Entries[0].Payload, json.RawMessage(`[2,3,4]`))
}

// Guard: cancel_one waits for no key. Two transactions that cancel entries of two keys do not wait in a circle.
func TestCancelsOfTwoKeysDoNotWaitForOneAnother(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.pushAll(b.pool, Push{LockKey: "a"}, Push{LockKey: "b"}, Push{LockKey: "a"}, Push{LockKey: "b"})
	one, two := b.begin(), b.begin()
	for i, tx := range []pgx.Tx{one, two, two, one} {
		b.exec(tx, `SET LOCAL lock_timeout = '1ms'`)
		_, err := cancelEntry(b.ctx, tx, ids[i], ann)
		b.must(err)
	}
	b.commit(one)
	b.commit(two)
	_, err := b.q.SettleCancelRequests(b.ctx, 10)
	b.must(err)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
}

// Guard: bulk operations keep an entry whose key is compacted among the busy ones.
func TestOperationTriesAgainToCancelWhatIsCompacted(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	b.pushPayloads(`1`, `2`)
	b.pushAll(b.pool, Push{LockKey: "other"})
	compaction := b.begin()
	b.exec(compaction, `SELECT penstock.compact('work', 'K')`)
	id := b.count(`SELECT penstock.start_operation('work', 'cancel', '{"all": true}', per_second => 1000)`)
	const stepSQL = `SELECT changed FROM penstock.step_operation($1)`
	b.want(b.count(stepSQL, id), 1)
	b.want(b.count(`SELECT cardinality(busy) FROM penstock.operation`), 2)
	b.commit(compaction)
	b.exec(b.pool, `UPDATE penstock.operation SET stepped_at = stepped_at - interval '1 second'`)
	b.want(b.count(stepSQL, id), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
}

// A transaction that compacts a key and does not end refuses the cancel, instead of a request that may come too late.
func TestCancelOfAKeyThatIsNotGivenBackIsRefused(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	ids := b.pushPayloads(`1`, `2`)
	compaction := b.begin()
	b.exec(compaction, `SELECT penstock.compact('work', 'K')`)
	_, err := cancelEntry(b.ctx, b.pool, ids[0], ann)
	if code := postgres.Code(err); code != postgres.LockNotAvailable {
		t.Errorf("cancel: %v", err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
}
