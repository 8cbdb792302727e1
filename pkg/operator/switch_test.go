package operator_test

import (
	"testing"
	"time"

	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// A push is open while entries of its name are paused or resumed: it has read the state from before, and commits after.

var mailOfWork = operator.Subject{Scope: operator.ByName, Value: "mail", Queue: "work"}

func TestAPushThatSawThePauseIsEnabledAfterTheResume(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.did(b.d.Pause(b.ctx, mailOfWork, ann, time.Time{}))
	pusher := b.begin()
	id := b.pushAll(pusher, Push{Name: "mail"})[0]
	b.must(b.d.Resume(b.ctx, mailOfWork, ann))
	b.runOperations()
	b.must(pusher.Commit(b.ctx))
	b.runOperations()
	b.want(entryIDs(b.claim(9)...), []EntryID{id})
	b.wantNoOperation()
}

func TestAPushThatSawNoPauseIsDisabledAfterIt(t *testing.T) {
	b := newQueueBed(t, Config{})
	pusher, later := b.begin(), b.begin()
	id := b.pushAll(pusher, Push{Name: "mail", LockKey: "K"})[0]
	other := b.pushAll(later, Push{Name: "mail"})[0]
	b.did(b.d.Pause(b.ctx, mailOfWork, ann, time.Time{}))
	b.runOperations()
	b.must(pusher.Commit(b.ctx))
	b.want(b.runOperations(), 1)
	b.must(later.Commit(b.ctx))
	b.want(b.runOperations(), 1)
	b.want(len(b.claim(9)), 0)
	b.wantNoOperation()
	b.must(b.d.Resume(b.ctx, mailOfWork, ann))
	b.runOperations()
	b.want(len(b.claim(9)), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id IN ($1, $2)`, id, other), 2)
}

// A pause that was resumed while a push of its time is open disables nothing any more, whichever operation looks first.
func TestAPauseThatHasEndedDisablesNothing(t *testing.T) {
	b := newQueueBed(t, Config{})
	pusher := b.begin()
	id := b.pushAll(pusher, Push{Name: "mail"})[0]
	b.did(b.d.Pause(b.ctx, mailOfWork, ann, time.Time{}))
	b.must(b.d.Resume(b.ctx, mailOfWork, ann))
	b.must(pusher.Commit(b.ctx))
	b.want(b.runOperations(), 0)
	b.want(entryIDs(b.claim(9)...), []EntryID{id})
	b.wantNoOperation()
}

// Transactions that do not write hold up no switch.
func TestASwitchDoesNotWaitForReaders(t *testing.T) {
	b := newQueueBed(t, Config{})
	reader := b.begin()
	b.exec(reader, `SELECT count(*) FROM penstock.entry`)
	b.did(b.d.Pause(b.ctx, mailOfWork, ann, time.Time{}))
	b.runOperations()
	b.wantNoOperation()
	b.must(reader.Rollback(b.ctx))
}

// wantNoOperation fails if an operation has not ended. Other databases of the server may have open transactions.
func (b *queueBed) wantNoOperation() {
	b.Helper()
	for until := time.Now().Add(time.Minute); b.count(`SELECT count(*) FROM penstock.operation WHERE status = 'running'`) > 0; {
		if time.Now().After(until) {
			b.Fatal("the operation of a switch has not ended")
		}
		b.runOperations()
	}
}

// Two first pauses of a subject at once: the second neither sees the row of the first before it waits for it, nor may it
// replace that without a word.
func TestASecondPauseBesideTheFirstSaysThatItReplacesIt(t *testing.T) {
	b := newQueueBed(t, Config{Model: "m"})
	for _, s := range []operator.Subject{
		{Scope: operator.ByModel, Value: "m"}, {Scope: operator.ByFlow, Value: "f", Queue: "work"}, mailOfWork,
	} {
		first := b.begin()
		b.exec(first, `SELECT penstock.pause($1, $2, nullif($3, ''), 'a migration', 'ada')`, s.Scope, s.Value, s.Queue)
		replaced, failed := make(chan *operator.Replaced, 1), make(chan error, 1)
		go func() {
			r, err := b.d.Pause(b.ctx, s, By{Actor: "bob", Reason: "a test"}, time.Time{})
			replaced <- r
			failed <- err
		}()
		const waits = `SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`
		deadline := time.Now().Add(time.Minute)
		for b.count(waits, first.Conn().PgConn().PID()) == 0 {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the second pause does not wait for the first", s)
			}
			time.Sleep(2 * time.Millisecond)
		}
		b.must(first.Commit(b.ctx))
		if r, err := <-replaced, <-failed; err != nil || r == nil || r.Actor != "ada" {
			t.Errorf("%s: the second pause replaced %+v (%v), want that of ada", s, r, err)
		}
		b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE actor = 'bob' AND detail->'replaced'->>'actor' = 'ada'
			AND object = $1`, string(s.Scope)+" "+s.Value), 1)
	}
}
