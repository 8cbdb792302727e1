package migrations_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// A transaction that pushes may have begun long before: an entry that counted its deadlines from then was expired at once.
func TestDeadlinesOfAQueueCountFromThePush(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail', '{"start_within": "1 hour", "finish_within": "2 hours"}')`)
	exec(t, c, `BEGIN`)
	exec(t, c, `SELECT pg_sleep(0.01)`)
	began := query[time.Time](t, c, `SELECT clock_timestamp()`)
	exec(t, c, `SELECT penstock.push('mail', '{}')`)
	if !query[bool](t, c, `SELECT start_by >= $1::timestamptz + interval '1 hour' AND finish_by >= $1::timestamptz + interval '2 hours'
	                         FROM penstock.entry`, began) {
		t.Error("the deadlines are those of the beginning of the transaction")
	}
	exec(t, c, `COMMIT`)
}

// After the clock was set back there are samples of a time to come. They hid each newer one until that time.
func TestSamplesOfATimeToComeHideNoOthers(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail');
		CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE);
		CREATE TABLE penstock.sample_minute_ever PARTITION OF penstock.sample_minute FOR VALUES FROM (MINVALUE) TO (MAXVALUE);
		CREATE FUNCTION sampled(at timestamptz, pending bigint) RETURNS penstock.sample LANGUAGE sql AS $$
		    SELECT jsonb_populate_record(m, jsonb_build_object('at', $1, 'pending', $2))
		      FROM penstock.queue q CROSS JOIN LATERAL penstock.measure(q) m WHERE q.name = 'mail' $$`)
	exec(t, c, `BEGIN`) // no minute passes
	exec(t, c, `INSERT INTO penstock.sample SELECT (sampled(now() + make_interval(mins => m), 100 + m)).* FROM unnest('{-3, 0, 1}'::int[]) m`)
	if n := query[int64](t, c, `SELECT (penstock.last_sample(id)).pending FROM penstock.queue WHERE name = 'mail'`); n != 100 {
		t.Errorf("the newest sample has %d pending entries, want the 100 of now", n)
	}
	exec(t, c, `INSERT INTO penstock.sample_minute SELECT (sampled(date_trunc('minute', now()) + interval '5 minutes', 1)).*`)
	if n := query[int64](t, c, `SELECT penstock.roll_up_samples()`); n != 1 {
		t.Errorf("%d minutes that have passed were written, want 1", n)
	}
	exec(t, c, `COMMIT`)
}

// A budget of a day of UTC ends with it, also in a session whose clocks change in the course of that day.
func TestTheBudgetOfADayEndsAtMidnightOfUTC(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	today := time.Now().UTC().YearDay() - 1
	for _, zone := range []string{
		fmt.Sprintf("AAA0BBB-1,%d/1,%d/1", today, (today+100)%365), // from 1:00 on it is an hour later
		fmt.Sprintf("AAA0BBB-1,%d/1,%d/1", (today+100)%365, today),
	} {
		exec(t, c, fmt.Sprintf(`SET TimeZone = '%s'`, zone))
		ends := query[time.Time](t, c, `
SELECT clock_timestamp() + s.ends_in * interval '1 second' FROM penstock.gpu_spent('{acme}', 'day') s`)
		if midnight := ends.UTC().Round(24 * time.Hour); ends.Sub(midnight).Abs() > time.Minute {
			t.Errorf("%s: the day ends at %s", zone, ends.UTC())
		}
	}
}

// Use that was recorded while the clock was ahead is not of this day: it would be of that of its hour as well.
func TestTheBudgetOfADayHasNoUseOfTheNext(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `
INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
SELECT clock_timestamp() + n * interval '1 day', 1, 'm', 'acme', 1, 10 ^ (n + 1), 0, 0, 0, 0 FROM generate_series(-1, 1) n`)
	spent := query[int64](t, c, `SELECT (penstock.gpu_spent('{acme}', 'day')).ms`)
	if spent != 10 && spent != 100 { // the day may have ended in between
		t.Errorf("%d ms are spent, want the 10 of today alone", spent)
	}
}

// Claims of a queue that another transaction has made since this one began do not know of the limit.
func TestUseOfALimitWaitsForClaimsOfAQueueThatIsYounger(t *testing.T) {
	dsn := pgtest.DSN(t)
	c, other := connect(t, dsn), connect(t, dsn)
	const locked = `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'penstock.lock'::regclass AND mode = 'ShareLock')`
	exec(t, c, `SELECT penstock.set_limit('gpus', '{"max_units": 1}')`)
	exec(t, c, `BEGIN`)
	exec(t, c, `SELECT pg_sleep(0.01)`)
	exec(t, other, `SELECT penstock.create_queue('mail')`)
	exec(t, c, `SELECT penstock.create_queue('own'), penstock.use_limit('own', 'gpus', 1)`)
	if query[bool](t, c, locked) {
		t.Error("a queue that the transaction has made itself waits for claims")
	}
	exec(t, c, `SELECT penstock.use_limit('mail', 'gpus', 1)`)
	if !query[bool](t, c, locked) {
		t.Error("claims of a queue that was made after the transaction began are not awaited")
	}
	exec(t, c, `COMMIT`)
}

// While another transaction has the row of an instance, its announcements wait. The instance announced itself all the while.
func TestATimeToLiveCountsFromWhenTheAnnouncementHasItsLocks(t *testing.T) {
	dsn := pgtest.DSN(t)
	c, other := connect(t, dsn), connect(t, dsn)
	const announce = `SELECT penstock.announce_instance('m', 'gpu-1', 'http://127.0.0.1:1', 1, ttl => '1 hour')`
	exec(t, c, `SELECT penstock.register_model('m', '{"protocol": "openai"}')`)
	exec(t, c, announce)
	exec(t, other, `BEGIN; SELECT FROM penstock.instance FOR UPDATE`)
	announced := make(chan error, 1)
	go func() { announced <- execAfter(dsn, announce) }()
	for !query[bool](t, c, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))`,
		other.PgConn().PID()) {
		select {
		case err := <-announced:
			t.Fatalf("the announcement did not wait: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	waits := query[time.Time](t, c, `SELECT clock_timestamp()`)
	exec(t, other, `COMMIT`)
	if err := <-announced; err != nil {
		t.Fatal(err)
	}
	if !query[bool](t, c, `SELECT expires_at >= $1::timestamptz + interval '1 hour' FROM penstock.instance`, waits) {
		t.Error("the time to live began before the announcement had the row")
	}
}
