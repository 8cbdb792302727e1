package invalidation

import (
	"testing"
	"time"
)

// A node whose clock differs from the database's ends the pause of a queue when the database does, as it ends those of
// flows, models and applications.
func TestPauseEndsByTheClockOfTheDatabase(t *testing.T) {
	b := newBed(t, Config{})
	db := b.begin()
	b.exec(db, `CREATE SCHEMA slow`)
	b.exec(db, `CREATE FUNCTION slow.clock_timestamp() RETURNS timestamptz
		LANGUAGE sql AS $$ SELECT pg_catalog.clock_timestamp() - interval '1 hour' $$`)
	b.exec(db, `SET LOCAL search_path = slow, pg_catalog`)
	b.exec(db, `UPDATE penstock.queue SET paused_at = clock_timestamp(), paused_by = 'ann', paused_reason = '',
		paused_until = clock_timestamp() + interval '10 minutes'`)
	b.exec(db, `INSERT INTO penstock.pause (scope, value, actor, reason, until)
		VALUES ('flow', 'f', 'ann', '', clock_timestamp() + interval '20 minutes')`)
	q, err := Open(b.ctx, db, "work")
	b.must(err)
	now := time.Now()
	for flow, minutes := range map[string]time.Duration{"": 10, "f": 20} {
		if _, paused := q.Paused(flow, now.Add((minutes-1)*time.Minute)); !paused {
			t.Errorf("flow %q is not paused a minute before the end by the database's clock", flow)
		}
		if _, paused := q.Paused(flow, now.Add((minutes+1)*time.Minute)); paused {
			t.Errorf("flow %q is paused a minute after the end by the database's clock", flow)
		}
	}
	b.must(db.Rollback(b.ctx))
}

func TestPauseUntilADistantTimeIsInForce(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.pause_queue('work', until => '9999-01-01')`)
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	if _, paused := q.Paused("", time.Now()); !paused {
		t.Error("the queue is not paused")
	}
}

// A list has what is set for flows in all queues once, and each queue knows the same as one that was read alone.
func TestAListKnowsThePausesAndWeightsOfFlows(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.create_queue('other', '{"application": "shop"}')`)
	b.exec(b.pool, `SELECT penstock.set_flow_weight('all', 4), penstock.set_flow_weight('both', 3),
		penstock.set_flow_weight('both', 0.1, 'work'), penstock.set_flow_weight('one', 2, 'work')`)
	b.exec(b.pool, `INSERT INTO penstock.pause (scope, value, queue_id, actor, reason)
		VALUES ('flow', 'stopped', NULL, 'ann', ''), ('flow', 'here', $1, 'ann', ''), ('application', 'shop', NULL, 'ann', '')`, b.q.ID)
	queues, err := List(b.ctx, b.pool)
	b.must(err)
	for _, listed := range queues {
		alone, err := Open(b.ctx, b.pool, listed.Name)
		b.must(err)
		for _, flow := range []string{"", "all", "both", "one", "stopped", "here"} {
			if listed.FlowWeight(flow) != alone.FlowWeight(flow) {
				t.Errorf("flow %q of queue %s weighs %v in a list, %v alone", flow, listed.Name, listed.FlowWeight(flow), alone.FlowWeight(flow))
			}
			_, paused := alone.Paused(flow, time.Now())
			if _, got := listed.Paused(flow, time.Now()); got != paused {
				t.Errorf("flow %q of queue %s is paused: %t in a list, %t alone", flow, listed.Name, got, paused)
			}
		}
	}
	served, err := ListOf(b.ctx, b.pool, "default")
	b.must(err)
	for _, q := range served {
		if q.Name == "other" {
			t.Error("nodes read a queue of another application")
		}
	}
}
