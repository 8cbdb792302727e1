package batch

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// manyBatches makes n batches of one part each that wait for a step.
func (b *bed) manyBatches(n int) {
	b.Helper()
	if _, err := b.pool.Exec(b.ctx, `
		WITH made AS (
		    INSERT INTO penstock.batch (queue_id, name, status, actor)
		    SELECT $1, 'one of many', 'running', 'ada' FROM generate_series(1, $2) RETURNING id)
		INSERT INTO penstock.batch_part (batch_id, no, items) SELECT id, 1, '[1]' FROM made`, b.q.ID, n); err != nil {
		b.Fatal(err)
	}
}

// A pass takes a bounded number of batches, and the next passes go on behind them: the first batches do not keep the
// others from their steps.
func TestPassesGoOnBehindTheBatchesOfTheOneBefore(t *testing.T) {
	b := newBed(t)
	b.manyBatches(2*passBatches + 50)
	counter := &counted{open: open{b.pool}}
	b.stepper = NewStepper(b.pool, counter, Config{})
	for i, want := range []int{passBatches, 2 * passBatches, 2*passBatches + 50} {
		counter.n = 0
		if err := b.stepper.pass(b.ctx); err != nil {
			t.Fatal(err)
		}
		if counter.n > passBatches+1 { // and the deletion of ended batches
			t.Errorf("pass %d made %d transactions, want at most %d", i+1, counter.n, passBatches+1)
		}
		if fed := b.count(`SELECT count(*) FROM penstock.batch_part WHERE entry_id IS NOT NULL`); fed != want {
			t.Errorf("after pass %d, %d batches have their part in the queue, want %d", i+1, fed, want)
		}
	}
	if b.stepper.after != 0 || !b.stepper.busy {
		t.Errorf("after the last batch the next pass begins behind %d, busy: %t", b.stepper.after, b.stepper.busy)
	}
	b.drain()
	if done := b.count(`SELECT count(*) FROM penstock.batch WHERE status = 'done'`); done != 2*passBatches+50 {
		t.Errorf("%d batches are done, want %d", done, 2*passBatches+50)
	}
}

// A pass of each leader reads its page: planned over the tables of all queues it would lock each of them.
func TestPageOfBatchesLocksTheTablesOfTheirQueuesAlone(t *testing.T) {
	b := newBed(t)
	b.manyBatches(2)
	_, err := b.pool.Exec(b.ctx, `
		WITH other AS (SELECT penstock.create_queue('other'))
		UPDATE penstock.batch SET status = 'splitting', split_entry_id = 1 FROM other`)
	if err != nil {
		t.Fatal(err)
	}
	var locked int
	err = pgx.BeginFunc(b.ctx, b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.ctx, pageSQL, 0, passBatches); err != nil {
			return err
		}
		return tx.QueryRow(b.ctx, `
			SELECT count(DISTINCT l.relation) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation
			 WHERE i.inhparent = 'penstock.entry'::regclass AND l.pid = pg_backend_pid()`).Scan(&locked)
	})
	if err != nil || locked != 1 {
		t.Errorf("the tables of %d queues are locked (%v), want 1", locked, err)
	}
}

// The duty does not wait between the passes over one list of batches.
func TestManyBatchesAreSteppedWithoutAPauseBetweenPasses(t *testing.T) {
	b := newBed(t)
	b.manyBatches(3 * passBatches)
	counter := &counted{open: open{b.pool}}
	fed := make(chan int32, 3*passBatches)
	b.stepper = NewStepper(b.pool, counter, Config{Pause: time.Hour, Hint: func(q int32) { fed <- q }})
	ended := make(chan error, 1)
	go func() { ended <- b.stepper.Run(b.ctx) }()
	for range 3 * passBatches {
		select {
		case <-fed:
		case err := <-ended:
			t.Fatalf("the duty ended: %v", err)
		}
	}
}

func TestCancelEndsABoundedNumberOfPartsAStep(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(1), Window: 1})
	const parts = 25_000
	if _, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.batch_part (batch_id, no, items)
		SELECT $1, g, '[1]' FROM generate_series(2, $2) g`, id, parts); err != nil {
		t.Fatal(err)
	}
	b.exec(`SELECT penstock.cancel_batch(id, 'wrong set', 'ada') FROM penstock.batch`)
	for i, want := range []int{10_000, 20_000, parts} {
		if err := b.stepper.pass(b.ctx); err != nil {
			t.Fatal(err)
		}
		if ended := b.count(`SELECT count(*) FROM penstock.batch_part WHERE ended_at IS NOT NULL`); ended != want || !b.stepper.busy {
			t.Errorf("after step %d, %d parts have ended (busy: %t), want %d", i+1, ended, b.stepper.busy, want)
		}
	}
	b.drain()
	if s := b.status(id); s.State != "cancelled" || s.Bad != parts {
		t.Errorf("ended as %+v", s)
	}
}

func TestPartsOfEndedBatchesAreDeletedInBoundedNumbers(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(1), Window: 1})
	b.drain()
	const parts = 2 * clearedMax
	if _, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.batch_part (batch_id, no, items, outcome, ended_at)
		SELECT $1, g, '[1]', 'failed', now() FROM generate_series(2, $2) g`, id, parts); err != nil {
		t.Fatal(err)
	}
	b.exec(`UPDATE penstock.batch SET status = 'failed', ended_at = clock_timestamp() - interval '31 days'`)
	b.stepper = NewStepper(b.pool, open{b.pool}, Config{})
	for left := parts; left > 0; {
		most := b.stepper.rows.Rows()
		b.clear()
		now := b.count(`SELECT count(*) FROM penstock.batch_part`)
		if want := max(0, left-most); now != want || most > clearedMax {
			t.Fatalf("a transaction of %d rows left %d of %d parts, want %d", most, now, left, want)
		}
		if left == parts { // a batch without its first parts cannot be run again
			if err := Retry(b.ctx, b.pool, id, invalidation.By{Actor: "ada"}); !errors.Is(err, invalidation.ErrState) {
				t.Errorf("retry of a batch that is being deleted: %v, want it refused", err)
			}
		}
		left = now
	}
	if b.clear(); b.count(`SELECT count(*) FROM penstock.batch`) != 0 {
		t.Error("the batch without parts is left")
	}
}

// clear makes a pass in which old batches are deleted.
func (b *bed) clear() {
	b.Helper()
	b.stepper.clearAfter = time.Time{}
	if err := b.stepper.pass(b.ctx); err != nil {
		b.Fatalf("delete old batches: %v", err)
	}
}

// Parts of which the deadline of a statement permits few: their deletion is no failure of the duty, and comes to an end.
func TestOldBatchesWithLargePartsAreDeleted(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(1), Window: 1})
	b.drain()
	if _, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.batch_part (batch_id, no, items, outcome, ended_at)
		SELECT $1, g, '[1]', 'done', now() FROM generate_series(2, 60) g`, id); err != nil {
		t.Fatal(err)
	}
	b.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF (SELECT count(*) FROM gone) > 20 THEN
		    RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
		END IF;
		RETURN NULL; END $$`)
	b.exec(`CREATE TRIGGER slow AFTER DELETE ON penstock.batch_part REFERENCING OLD TABLE AS gone
		FOR EACH STATEMENT EXECUTE FUNCTION slow()`)
	b.exec(`UPDATE penstock.batch SET ended_at = clock_timestamp() - interval '31 days'`)
	b.stepper = NewStepper(b.pool, open{b.pool}, Config{})
	for range 100 {
		if b.clear(); b.count(`SELECT count(*) FROM penstock.batch`) == 0 {
			return
		}
	}
	t.Errorf("%d parts are left after 100 transactions", b.count(`SELECT count(*) FROM penstock.batch_part`))
}

// The first rows to be deleted after a time without any may be large ones.
func TestTransactionsThatDeleteLittleDoNotRaiseTheirLimit(t *testing.T) {
	b := newBed(t)
	for range 5 {
		b.create(Batch{Items: numbers(1), Window: 1})
		b.drain()
		b.exec(`UPDATE penstock.batch SET ended_at = clock_timestamp() - interval '31 days'`)
		b.clear()
		b.clear()
	}
	if n := b.count(`SELECT count(*) FROM penstock.batch`); n != 0 || b.stepper.rows.Rows() != clearedFirst {
		t.Errorf("%d batches are left, and the limit is %d rows, want %d", n, b.stepper.rows.Rows(), clearedFirst)
	}
}

func TestManyOldBatchesAreDeletedAtOnce(t *testing.T) {
	b := newBed(t)
	const batches = 300
	b.exec(fmt.Sprintf(`WITH b AS (
		INSERT INTO penstock.batch (queue_id, name, status, actor, ended_at)
		SELECT q.id, 'old', 'done', 'ada', clock_timestamp() - interval '31 days'
		  FROM penstock.queue q, generate_series(1, %d) WHERE q.name = 'parts' RETURNING id)
	INSERT INTO penstock.batch_part (batch_id, no, items, outcome, ended_at) SELECT id, 1, '[1]', 'done', now() FROM b`, batches))
	if b.clear(); b.count(`SELECT count(*) FROM penstock.batch`) != 0 {
		t.Errorf("%d of %d old batches are left", b.count(`SELECT count(*) FROM penstock.batch`), batches)
	}
}
