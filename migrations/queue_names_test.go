package migrations_test

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// Each valid name is taken beside each other one, unless the table of a queue would have the name of something else that
// exists: of a view or table of Penstock, or of the primary key of a queue.
func TestQueuesOfAllValidNamesAreMade(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	for _, name := range []string{strings.Repeat("q", 48), strings.Repeat("q", 47), "mail"} {
		exec(t, c, `SELECT penstock.create_queue('`+name+`')`)
	}
	for _, suffix := range []string{"lock_key", "lock_key_apart", "due_at", "start_by", "finish_by", "name", "disabled", "initial"} {
		exec(t, c, `SELECT penstock.create_queue('mail_`+suffix+`')`)
		exec(t, c, `SELECT penstock.create_queue('own_`+suffix+`')`)
	}
	exec(t, c, `SELECT penstock.create_queue('own')`)
	for _, name := range []string{"status", "harm", "id_seq", "mail_pkey"} {
		_, err := c.Exec(t.Context(), `SELECT penstock.create_queue($1)`, name)
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "penstock.entry_"+name+", which exists") {
			t.Errorf("queue %q: %v, want PS002 that names the relation", name, err)
		}
	}
}

// Estimates and the autoscaler read indexes of queues by name, also of those that were made before names had the id.
func TestIndexesOfAQueueAreFound(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail')`)
	const found = `
SELECT count(*) FROM penstock.queue q CROSS JOIN unnest('{due_at,start_by,disabled}'::text[]) s
  JOIN pg_index i ON i.indexrelid = penstock.entry_index(q, s) AND i.indrelid = 'penstock.entry_mail'::regclass
 WHERE q.name = 'mail'`
	if n := query[int64](t, c, found); n != 3 {
		t.Errorf("%d of 3 indexes are found", n)
	}
	exec(t, c, `DO $$ DECLARE s text; BEGIN
		FOREACH s IN ARRAY '{due_at,start_by,disabled}'::text[] LOOP
			EXECUTE format('ALTER INDEX penstock.%I RENAME TO %I', (SELECT s || '_' || id FROM penstock.queue WHERE name = 'mail'), 'entry_mail_' || s);
		END LOOP; END $$`)
	if n := query[int64](t, c, found); n != 3 {
		t.Errorf("%d of 3 indexes are found by names of before", n)
	}
}
