package migrations_test

import (
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// The counter of endings moves after they are committed. An ending that it told of while a queue was counted was taken
// from a count that did not have the entry.
func TestAnEndingDuringACountIsNotCountedTwice(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail', '{"capacity": 10}');
		CREATE OR REPLACE FUNCTION penstock.open_pushes() RETURNS TABLE (key oid, entries bigint, mine boolean) LANGUAGE plpgsql AS $$
		BEGIN
		    PERFORM penstock.count(q.id, 'removed', 1) FROM penstock.queue q WHERE q.name = 'mail';
		END $$`)
	exec(t, c, `SELECT penstock.count_depth(id) FROM penstock.queue WHERE name = 'mail'`)
	if n := query[int64](t, c, `SELECT d.counted - (penstock.counter('removed', d.queue_id) - d.removed) FROM penstock.depth d`); n != 0 {
		t.Errorf("the depth of a queue that is empty is %d", n)
	}
}
