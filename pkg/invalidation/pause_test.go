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
