package maintenance_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/maintenance"
)

func TestOperationIsCarriedOut(t *testing.T) {
	f := newUsualFleet(t)
	f.push(1200, "")
	f.exec(`SELECT penstock.start_operation('work', 'cancel', '{"all": true}', per_second => 100000)`)
	duty := maintenance.NewOperations(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 20 * time.Millisecond})
	run(t, duty)
	eventually(t, "all entries are cancelled", func() bool { return f.count(`SELECT count(*) FROM penstock.entry`) == 0 })
	eventually(t, "they are counted", func() bool { return duty.Changed() == 1200 })
}

func TestOperationThatFailsKeepsNoOtherFromItsTurn(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('other')`)
	f.exec(`SELECT penstock.push('work', '{}'), penstock.push('other', '{}')`)
	f.exec(`CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'`)
	f.exec(`CREATE TRIGGER no BEFORE DELETE ON penstock.entry_work FOR EACH ROW EXECUTE FUNCTION public.no()`)
	f.exec(`SELECT penstock.start_operation('work', 'cancel', '{"all": true}'), penstock.start_operation('other', 'cancel', '{"all": true}')`)
	run(t, maintenance.NewOperations(f.pool, &term{db: f.pool}, maintenance.Config{}))
	status := func(queue string) int {
		return f.count(`SELECT count(*) FROM penstock.operation o JOIN penstock.queue q ON q.id = o.queue_id WHERE q.name = $1 AND o.status = 'done'`, queue)
	}
	eventually(t, "the operation of the other queue is done", func() bool { return status("other") == 1 })
	if status("work") != 0 {
		t.Error("the operation that fails is done")
	}
	if n := f.count(`SELECT count(*) FROM penstock.operation o JOIN penstock.queue q ON q.id = o.queue_id
	    WHERE q.name = 'other' AND (o.failed_steps > 0 OR o.error IS NOT NULL OR o.failed_at IS NOT NULL)`); n != 0 {
		t.Error("the operation of the other queue has an error")
	}
	eventually(t, "the operation has its error", func() bool {
		return f.count(`SELECT count(*) FROM penstock.operation
		    WHERE status = 'running' AND failed_steps >= 2 AND error LIKE '%no%' AND failed_at > created_at`) == 1
	})
	f.exec(`DROP TRIGGER no ON penstock.entry_work`)
	eventually(t, "the operation that failed goes on", func() bool { return status("work") == 1 })
	if n := f.count(`SELECT count(*) FROM penstock.operation WHERE failed_steps = 0 AND error LIKE '%no%'`); n != 1 {
		t.Error("a step that succeeded ends the count of failed ones, and keeps the last error")
	}
}

// A transaction that had locked the row of a queue let no pause end, ended no turn of an operation, and after 30 s the
// term of the leader.
func TestAPauseThatCannotEndKeepsNoOtherFromEnding(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('other')`)
	f.exec(`SELECT penstock.push('other', '{}')`)
	for range 3 {
		f.exec(`SELECT penstock.pause('flow', gen_random_uuid()::text, 'work')`)
	}
	f.exec(`SELECT penstock.pause('flow', 'f', 'other'), penstock.pause('name', 'n', 'other')`)
	f.exec(`UPDATE penstock.pause SET until = clock_timestamp() - interval '1 second'`)
	f.exec(`SELECT penstock.start_operation('other', 'cancel', '{"all": true}')`)
	letGo := f.hold(`SELECT FROM penstock.queue WHERE name = 'work' FOR UPDATE`)
	run(t, maintenance.NewOperations(f.pool, bounded{&term{db: f.pool}}, maintenance.Config{
		Pause: time.Millisecond, GiveUp: time.Millisecond,
	}))
	paused := func(queue string) int {
		return f.count(`SELECT count(*) FROM penstock.pause p JOIN penstock.queue q ON q.id = p.queue_id WHERE q.name = $1`, queue)
	}
	eventually(t, "the pauses of the other queue have ended", func() bool { return paused("other") == 0 })
	eventually(t, "the operation is done", func() bool {
		return f.count(`SELECT count(*) FROM penstock.operation WHERE verb = 'cancel' AND status = 'running'`) == 0
	})
	if n := paused("work"); n != 3 {
		t.Errorf("%d pauses of the queue that is locked are left", n)
	}
	letGo()
	eventually(t, "the pauses of the queue that was locked have ended", func() bool { return paused("work") == 0 })
}

// Each queue whose row another transaction had locked took 50 ms of the half second that a call has: with ten of them
// the pauses of the queues after them never ended.
func TestPausesEndBesideManyQueuesThatAreLocked(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.create_queue('locked' || n) FROM generate_series(1, 12) n`)
	f.exec(`SELECT penstock.pause('flow', 'f', 'locked' || n) FROM generate_series(1, 12) n`)
	f.exec(`SELECT penstock.pause('flow', 'f', 'work')`)
	f.exec(`UPDATE penstock.pause SET until = clock_timestamp() - interval '1 second'`)
	letGo := f.hold(`SELECT FROM penstock.queue WHERE name LIKE 'locked%' FOR UPDATE`)
	run(t, maintenance.NewOperations(f.pool, bounded{&term{db: f.pool}}, maintenance.Config{Pause: time.Millisecond}))
	const paused = `SELECT count(*) FROM penstock.pause`
	eventually(t, "the pause of the queue that is not locked has ended", func() bool { return f.count(paused) == 12 })
	letGo()
	eventually(t, "the pauses of the queues that were locked have ended", func() bool { return f.count(paused) == 0 })
}

// A hundred pauses that ended at once enabled up to 500 entries each in one transaction, which may take two seconds:
// it was rolled back, and tried again for ever.
func TestPausesThatEndTogetherEndInSeveralTransactions(t *testing.T) {
	f := newUsualFleet(t)
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		f.exec(`SELECT penstock.push('work', '{}', name => $1), penstock.pause('name', $1, 'work')`, name)
	}
	f.exec(`UPDATE penstock.pause SET until = clock_timestamp() - interval '1 second'`)
	f.exec(`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END'`)
	f.exec(`CREATE TRIGGER slow BEFORE UPDATE ON penstock.entry_work FOR EACH ROW EXECUTE FUNCTION public.slow()`)
	run(t, maintenance.NewOperations(f.pool, bounded{&term{db: f.pool}}, maintenance.Config{Pause: time.Millisecond}))
	eventually(t, "all pauses have ended", func() bool { return f.count(`SELECT count(*) FROM penstock.pause`) == 0 })
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE priority >= 0`); n != 8 {
		t.Errorf("%d entries are enabled", n)
	}
}
