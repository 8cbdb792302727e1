package operator

import (
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// A list begins counts for a second: of a thousand queues that are new, each of which takes 20 ms, it counts few.
func TestAListOfManyNewQueuesCountsFewOfThem(t *testing.T) {
	pool := pgtest.New(t)
	for _, sql := range []string{
		`INSERT INTO penstock.queue (name) SELECT 'q' || i FROM generate_series(1, 999) i`, // and the one of webhooks
		`CREATE SEQUENCE measured`,
		`ALTER FUNCTION penstock.measure(penstock.queue) RENAME TO counted`,
		`CREATE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample LANGUAGE plpgsql AS $$ BEGIN
		     PERFORM pg_sleep(0.02), nextval('measured');
		     RETURN penstock.counted(q);
		 END $$`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	d := New(pool)
	queues, err := d.Queues(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var counted int
	if err := pool.QueryRow(t.Context(), `SELECT last_value FROM measured`).Scan(&counted); err != nil {
		t.Fatal(err)
	}
	unmeasured := 0
	for _, q := range queues {
		if q.Unmeasured {
			unmeasured++
		}
	}
	if len(queues) != 1000 || unmeasured != 1000-counted || counted < 1 || counted > 51 {
		t.Errorf("the list has %d queues, %d of them unmeasured; it counted %d, want 1 to 51", len(queues), unmeasured, counted)
	}
	one, err := d.Queues(t.Context(), "q999")
	if err != nil || len(one) != 1 || one[0].Unmeasured {
		t.Errorf("a queue that is asked for by itself is not counted: %+v, %v", one, err)
	}
}

// On a busy server the first count of a session takes long: its functions are compiled.
func TestTheCountsOfAFewQueuesAreKnownHoweverLongTheyTake(t *testing.T) {
	pool := pgtest.New(t)
	for _, sql := range []string{
		`INSERT INTO penstock.queue (name) VALUES ('a'), ('b')`, // and the one of webhooks
		`ALTER FUNCTION penstock.measure(penstock.queue) RENAME TO counted`,
		`CREATE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample LANGUAGE plpgsql AS $$ BEGIN
		     PERFORM pg_sleep(0.6);
		     RETURN penstock.counted(q);
		 END $$`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	queues, err := New(pool).Queues(t.Context())
	if err != nil || len(queues) != 3 {
		t.Fatalf("the list has %d queues, want 3 (%v)", len(queues), err)
	}
	for _, q := range queues {
		if q.Unmeasured {
			t.Errorf("queue %s is unmeasured", q.Name)
		}
	}
}
