package recovery_test

import (
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

func TestOperationThatFailsKeepsNoOtherFromItsTurn(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{})
	f.exec(`SELECT penstock.create_queue('other')`)
	f.exec(`SELECT penstock.push('work', '{}'), penstock.push('other', '{}')`)
	f.exec(`CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'`)
	f.exec(`CREATE TRIGGER no BEFORE DELETE ON penstock.entry_work FOR EACH ROW EXECUTE FUNCTION public.no()`)
	f.exec(`SELECT penstock.start_operation('work', 'cancel', '{"all": true}'), penstock.start_operation('other', 'cancel', '{"all": true}')`)
	run(t, recovery.NewOperations(f.pool, &term{db: f.pool}, recovery.Config{}))
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
