package maintenance_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/maintenance"
)

// Entries that wait for an instance fail when the model has had none for the time of the queue; those of a queue that
// waits stay, and so do those that run.
func TestWaitingEntriesFailWhenTheModelHasHadNoInstanceForLong(t *testing.T) {
	f := newUsualFleet(t)
	for _, model := range []string{"fails", "waits"} {
		f.exec(`SELECT penstock.register_model('` + model + `', '{"protocol": "cog"}')`)
		f.exec(`SELECT penstock.register_instance('` + model + `', 'a', 'http://127.0.0.1:9/', 4)`)
	}
	f.exec(`SELECT penstock.alter_queue('fails', '{"on_no_instance": "fail", "no_instance_timeout": "1 hour"}')`)
	f.exec(`SELECT penstock.push('fails', '1'), penstock.push('fails', '2', lock_key => 'k'), penstock.push('waits', '3')`)
	f.exec(`SELECT penstock.push('fails', '4', due_at => clock_timestamp() + interval '1 hour')`)
	duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 20 * time.Millisecond})
	run(t, duty)
	f.exec(`UPDATE penstock.instance SET state = 'unhealthy'`)
	eventually(t, "the outage is recorded", func() bool {
		return f.count(`SELECT count(*) FROM penstock.model_outage WHERE model = 'fails'`) == 1
	})
	if n := f.count(`SELECT count(*) FROM penstock.failure`); n != 0 {
		t.Errorf("%d entries failed before the time of the queue", n)
	}
	f.exec(`SELECT penstock.alter_queue('fails', '{"no_instance_timeout": "10 milliseconds"}')`)
	eventually(t, "the waiting entries failed", func() bool {
		return f.count(`SELECT count(*) FROM penstock.failure WHERE class = 'no_instance'
		                   AND error LIKE 'model fails has had no instance that takes calls for%'`) == 2
	})
	if n := f.count(`SELECT count(*) FROM penstock.entry`); n != 2 {
		t.Errorf("%d entries are left, want the one that is not due and the one that waits", n)
	}
	f.exec(`UPDATE penstock.instance SET state = 'ready'`)
	eventually(t, "the outage is forgotten", func() bool {
		return f.count(`SELECT count(*) FROM penstock.model_outage`) == 0
	})
}
