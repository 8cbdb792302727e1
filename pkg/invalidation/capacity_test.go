package invalidation

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// pushFlow pushes one entry of a flow for each payload and returns the error.
func (b *bed) pushFlow(flow string, n int) error {
	b.Helper()
	pushes := make([]Push, n)
	for i := range pushes {
		pushes[i] = Push{Payload: json.RawMessage(`{}`), Flow: flow}
	}
	_, err := b.q.Push(b.ctx, pushes...)
	return err
}

// pushTimes pushes n entries, one in each statement.
func (b *bed) pushTimes(db postgres.DB, n int) {
	b.Helper()
	b.exec(db, `SELECT count(penstock.push('work', '1')) FROM generate_series(1, $1)`, n)
}

func (b *bed) fullFlow(err error) FullError {
	b.Helper()
	var full *FullError
	if !errors.Is(err, ErrQueueFull) || !errors.As(err, &full) || full.Flow == nil {
		b.Fatalf("the push answered %v, want a full flow", err)
	}
	return *full
}

func TestAFlowCannotFillTheQueue(t *testing.T) {
	b := newBed(t, Config{CapacityPerFlow: 3})
	if err := b.pushFlow("a", 3); err != nil {
		t.Fatal(err)
	}
	full := b.fullFlow(b.pushFlow("a", 1))
	if *full.Flow != "a" || full.Depth != 3 || full.Capacity != 3 {
		t.Errorf("full is %+v of flow %q, want 3 of 3 of a", full, *full.Flow)
	}
	if err := b.pushFlow("b", 3); err != nil {
		t.Errorf("another flow was refused: %v", err)
	}
	b.fullFlow(b.pushFlow("", 4))
	b.settle(doneAll(b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1, Flow: "a"}, Limit: 1}).Locks...)...)
	if err := b.pushFlow("a", 1); err != nil {
		t.Errorf("refused after an entry of the flow had ended: %v", err)
	}
}

// Entries of transactions that are open are counted, also of those that push several times.
func TestOpenPushesOfAFlowCountAgainstItsCapacity(t *testing.T) {
	b := newBed(t, Config{CapacityPerFlow: 4})
	tx := b.begin()
	for range 3 {
		b.pushAll(tx, Push{Flow: "a"})
	}
	if full := b.fullFlow(b.pushFlow("a", 2)); full.Depth != 3 {
		t.Errorf("depth is %d beside an open push of 3", full.Depth)
	}
	if err := b.pushFlow("a", 1); err != nil {
		t.Errorf("the last place was refused: %v", err)
	}
	b.commit(tx)
	b.fullFlow(b.pushFlow("a", 1))
}

// A snapshot that is older than the push misses entries that were committed since: such a push is refused with the
// setting at fault, and to other queues it is taken.
func TestACapacityOfFlowsIsCountedInReadCommittedOnly(t *testing.T) {
	b := newBed(t, Config{CapacityPerFlow: 2})
	free, err := Create(b.ctx, b.pool, "free", Config{})
	b.must(err)
	tx, err := b.pool.BeginTx(b.ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	b.must(err)
	defer tx.Rollback(b.ctx)
	if _, err := free.WithTx(tx).Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Flow: "a"}); err != nil { // takes the snapshot
		t.Fatal(err)
	}
	b.must(b.pushFlow("a", 2))
	_, err = b.q.WithTx(tx).Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Flow: "a"})
	if !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "capacity_per_flow, needs read committed") {
		t.Errorf("a push by an older snapshot: %v, want ErrState that names capacity_per_flow", err)
	}
}

func TestPushesThatMeetAtTheCapacityOfAFlowDoNotExceedIt(t *testing.T) {
	b := newBed(t, Config{CapacityPerFlow: 20})
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 10 {
				_, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Flow: "a"})
				if err != nil && !errors.Is(err, ErrQueueFull) {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	for b.pushFlow("a", 1) == nil { // those that met may have refused each other
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 20 {
		t.Errorf("%d entries were accepted, want 20", n)
	}
}

func TestCapacityFollowsTheSlotsOfTheModel(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.register_model('flux', '{"protocol": "cog"}')`)
	q, err := Alter(b.ctx, b.pool, "flux", map[string]any{"capacity_per_slot": 1.5})
	if err != nil {
		t.Fatal(err)
	}
	accepted := func() (n int) {
		for {
			_, err := q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
			if errors.Is(err, ErrQueueFull) {
				return b.count(`SELECT count(*) FROM penstock.entry`)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := accepted(); n != 2 {
		t.Errorf("%d entries accepted without an instance, want those of one slot: 2", n)
	}
	b.exec(b.pool, `SELECT penstock.register_instance('flux', 'a', 'http://127.0.0.1:9/', 4)`)
	if n := accepted(); n != 6 {
		t.Errorf("%d entries accepted with 4 slots, want 6", n)
	}
	if _, err := Alter(b.ctx, b.pool, "work", map[string]any{"capacity_per_slot": 1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("capacity_per_slot of a queue without a model: %v, want ErrInvalid", err)
	}
}

func TestAPushIsRefusedWhileTheModelHasNoInstance(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.register_model('flux', '{"protocol": "cog"}')`)
	q, err := Alter(b.ctx, b.pool, "flux", map[string]any{"on_no_instance": "fail"})
	if err != nil {
		t.Fatal(err)
	}
	push := func() error {
		_, err := q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), IdempotencyKey: "once"})
		return err
	}
	if err := push(); !errors.Is(err, ErrNoInstance) {
		t.Errorf("push without an instance: %v, want ErrNoInstance", err)
	}
	b.exec(b.pool, `SELECT penstock.register_instance('flux', 'a', 'http://127.0.0.1:9/', 4)`)
	if err := push(); err != nil {
		t.Errorf("push with an instance: %v", err)
	}
	b.exec(b.pool, `UPDATE penstock.instance SET state = 'unhealthy'`)
	if err := push(); err != nil {
		t.Errorf("a push that is repeated was refused: %v", err)
	}
}

// The endings are committed by then: an error would have them settled again, and refused.
func TestEndingsAreSettledWhateverTheirCountComesTo(t *testing.T) {
	b := newBed(t, Config{Capacity: 10})
	b.push("", "K")
	locks := b.claim(2)
	b.exec(b.pool, `ALTER TABLE penstock.depth RENAME TO depth_away`)
	for _, l := range locks {
		ours, err := b.q.Settle(b.ctx, here, doneAll(l))
		if err != nil || len(ours) != 1 {
			t.Errorf("settled %v (%v)", ours, err)
		}
	}
	b.exec(b.pool, `ALTER TABLE penstock.depth_away RENAME TO depth`)
}

// pushUntilFull pushes until the queue is full and returns how many entries it has then.
func (b *bed) pushUntilFull() int {
	b.Helper()
	for {
		_, err := b.q.WithTx(b.pool).Push(b.ctx, Push{Payload: json.RawMessage(`1`)})
		if errors.Is(err, ErrQueueFull) {
			return b.count(`SELECT count(*) FROM penstock.entry`)
		}
		b.must(err)
	}
}

func TestEndingsThatAreRefusedGiveNoHeadroom(t *testing.T) {
	b := newBed(t, Config{Capacity: 4})
	b.push("", "", "", "")
	done := doneAll(b.claimOne())
	b.settle(done...)
	for range 3 { // the answer was lost, and the node settles again
		if n := b.settleOn(b.pool, done...); n != 0 {
			t.Fatalf("%d tokens were ours", n)
		}
	}
	if n := b.pushUntilFull(); n != 4 {
		t.Errorf("%d entries in a queue of capacity 4", n)
	}
}

func TestEndingsAreCountedWhereSomeOfThemAreRefused(t *testing.T) {
	b := newBed(t, Config{Capacity: 4})
	b.push("", "", "", "")
	locks := b.claim(4)
	locks[0].Token = -1 // another's by now
	if n := b.settleOn(b.pool, doneAll(locks...)...); n != 3 {
		t.Fatalf("%d tokens were ours, want 3", n)
	}
	accepted := 0
	for range 9 {
		if _, err := b.q.WithTx(b.pool).Push(b.ctx, Push{Payload: json.RawMessage(`1`)}); err == nil {
			accepted++
		}
	}
	if accepted != 3 {
		t.Errorf("%d entries accepted after 3 of 4 had ended", accepted)
	}
}

// FinishTx does not count: whether the handler's transaction commits is not known then. The node's ending of the lock does.
func TestAnEntryThatEndsInTheHandlersTransactionIsCountedOnce(t *testing.T) {
	b := newBed(t, Config{Capacity: 4})
	b.push("", "", "", "")
	for _, commit := range []bool{true, false} {
		l := b.claimOne()
		run := &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
		tx := b.begin()
		b.must(run.FinishTx(b.ctx, tx, nil))
		if _, err := b.q.WithTx(b.pool).Push(b.ctx, Push{Payload: json.RawMessage(`1`)}); !errors.Is(err, ErrQueueFull) {
			t.Errorf("a push beside an open transaction that ends an entry: %v, want ErrQueueFull", err)
		}
		if commit {
			b.commit(tx)
		} else {
			b.must(tx.Rollback(b.ctx))
		}
		b.settle(doneAll(l)...)
		if n := b.pushUntilFull(); n != 4 {
			t.Errorf("commit %t: %d entries in a queue of capacity 4", commit, n)
		}
	}
}

func TestAnOpenTransactionThatPushesOneByOneCountsAgainstTheCapacity(t *testing.T) {
	b := newBed(t, Config{Capacity: 10})
	tx := b.begin()
	for range 2 {
		b.pushOn(tx, "")
	}
	b.exec(tx, `SAVEPOINT s`)
	for range 3 {
		b.pushOn(tx, "")
	}
	b.exec(tx, `ROLLBACK TO s`)
	for range 4 {
		b.pushOn(tx, "")
	}
	if n := b.count(`SELECT penstock.count_depth($1)`, b.q.ID); n != 6 {
		t.Errorf("the depth is %d beside a transaction that has pushed 6", n)
	}
	var own int
	b.must(tx.QueryRow(b.ctx, `SELECT penstock.count_depth($1)`, b.q.ID).Scan(&own))
	if own != 6 {
		t.Errorf("the depth is %d in a transaction that has pushed 6", own)
	}
	if n := b.pushUntilFull(); n != 4 {
		t.Errorf("%d entries accepted beside it in a queue of capacity 10", n)
	}
	b.commit(tx)
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 10 {
		t.Errorf("%d entries in a queue of capacity 10", n)
	}
}

// Advisory locks are few for the whole server.
func TestLongATransactionThatPushesOftenTakesFewLocks(t *testing.T) {
	b := newBed(t, Config{Capacity: 100_000, CapacityPerFlow: 100_000})
	tx := b.begin()
	n := pgtest.Long(1000, 2500)
	b.pushTimes(tx, n)
	locks := b.count(`SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
	                   WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objsubid = 2`)
	depth := b.count(`SELECT penstock.count_depth($1)`, b.q.ID)
	if locks > 250 || depth < n || depth > n*17/16 {
		t.Errorf("%d advisory locks show %d entries, want few and %d", locks, depth, n)
	}
}
