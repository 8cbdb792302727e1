package migrations_test

import (
	"fmt"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// What a queue has in millions was deleted while no transaction could use the tables of entries of any queue.
func TestADropDeletesPartsProgressAndFiringsBeforeItLocksTheTablesOfEntries(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('nightly', '{"kind": "batch"}'), penstock.create_queue('other', '{"kind": "batch"}');
		INSERT INTO penstock.batch (queue_id, name, status, actor, ended_at)
		SELECT q.id, q.name, s.status, 'ada', CASE s.status WHEN 'done' THEN now() END
		  FROM penstock.queue q CROSS JOIN (VALUES ('done'), ('running')) s(status) WHERE q.name IN ('nightly', 'other');
		INSERT INTO penstock.batch_part (batch_id, no, items) SELECT b.id, n, '[]' FROM penstock.batch b, generate_series(1, 10) n;
		INSERT INTO penstock.progress (queue_id, entry_id, token) SELECT q.id, n, 1 FROM penstock.queue q, generate_series(1, 10) n;
		INSERT INTO penstock.entry (id, queue_id, status, due_at, priority, payload)
		SELECT 1, q.id, 'initial', now() + interval '1 day', 1, '{}' FROM penstock.queue q WHERE q.name = 'nightly';
		INSERT INTO penstock.cron_job (queue_id, name, spec) SELECT q.id, q.name, '@hourly' FROM penstock.queue q WHERE q.name IN ('nightly', 'other');
		INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
		SELECT j.id, now() - n * interval '1 hour', now(), n, false FROM penstock.cron_job j, generate_series(1, 10) n;
		CREATE TABLE public.deleted (name text, locked boolean);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.deleted SELECT TG_TABLE_NAME, EXISTS (
				SELECT FROM pg_locks WHERE relation = 'penstock.entry'::regclass AND mode = 'AccessExclusiveLock' AND pid = pg_backend_pid());
			RETURN NULL;
		END $$;
		CREATE TRIGGER note AFTER DELETE ON penstock.batch_part FOR EACH ROW EXECUTE FUNCTION note();
		CREATE TRIGGER note AFTER DELETE ON penstock.progress FOR EACH ROW EXECUTE FUNCTION note();
		CREATE TRIGGER note AFTER DELETE ON penstock.cron_firing FOR EACH ROW EXECUTE FUNCTION note();
		SELECT penstock.drop_queue('nightly', true)`)
	// Under the lock go those of the batch and the entry that have not ended.
	for name, locked := range map[string]int64{"batch_part": 10, "progress": 1, "cron_firing": 0} {
		all, late := query[int64](t, c, `SELECT count(*) FROM public.deleted WHERE name = $1`, name), query[int64](t, c, `SELECT count(*) FROM public.deleted WHERE name = $1 AND locked`, name)
		if late != locked || all-late == 0 {
			t.Errorf("%d of %d rows of %s are deleted under the lock, want %d", late, all, name, locked)
		}
	}
	if n := query[int64](t, c, `SELECT count(*) FROM penstock.batch_part JOIN penstock.batch b ON b.id = batch_id JOIN penstock.queue q ON q.id = b.queue_id WHERE q.name = 'other'`); n != 20 {
		t.Errorf("%d parts of another queue are left, want 20", n)
	}
	if n := query[int64](t, c, `SELECT count(*) FROM penstock.cron_firing`); n != 10 {
		t.Errorf("%d firings of another queue's job are left, want 10", n)
	}
}

// Joins by the entry alone read the whole index of entries for each row of progress, in sessions that do without hashes.
func TestADropLooksUpTheEntriesOfProgressOneByOne(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	const entries, reports = 20_000, 1_000
	for _, sql := range []string{
		`SELECT penstock.create_queue('deep')`,
		fmt.Sprintf(`INSERT INTO penstock.entry_deep (id, queue_id, status, due_at, priority, payload)
			SELECT n, q.id, 'initial', now() + interval '1 day', 1, '{}' FROM penstock.queue q, generate_series(1, %d) n WHERE q.name = 'deep'`, entries),
		fmt.Sprintf(`INSERT INTO penstock.progress (queue_id, entry_id, token)
			SELECT q.id, n, 1 FROM penstock.queue q, generate_series(%d, %d) n WHERE q.name = 'deep'`, entries-reports+1, entries),
		`VACUUM (ANALYZE) penstock.entry_deep, penstock.progress`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var answer []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	row := pool.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT penstock.drop_queue('deep', true)`)
	if err := row.Scan(&answer); err != nil {
		t.Fatal(err)
	}
	if n := answer[0].Plan.Hit + answer[0].Plan.Read; n > 20*reports {
		t.Errorf("the drop of a queue with %d entries and %d rows of progress reads %d pages", entries, reports, n)
	}
}

// Who was promised to be told of the end of an entry is told, also where the queue is dropped by force.
func TestAForcedDropIsRefusedWhileClientsAreToBeTold(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mails'), penstock.push('mails', '{}', callback => '{"url": "https://client.example/done"}')`)
	drop := func() string {
		_, err := c.Exec(t.Context(), `SELECT penstock.drop_queue('mails', true)`)
		return postgres.Code(err)
	}
	if code := drop(); code != "PS006" {
		t.Errorf("a drop of a queue with an entry that has a callback: %q, want PS006", code)
	}
	exec(t, c, `SELECT penstock.cancel_entry(id) FROM penstock.entry_mails`)
	if n := query[int64](t, c, `SELECT count(*) FROM penstock.entry_webhook`); n != 1 {
		t.Errorf("the cancelled entry has %d callbacks, want 1", n)
	}
	exec(t, c, `INSERT INTO penstock.prediction (id, owner, entry_id, queue_id, model, version, input, webhook)
		SELECT 'p', 'ada', 1, q.id, 'm', 'm', '{}', 'https://client.example/' FROM penstock.queue q WHERE q.name = 'mails'`)
	if code := drop(); code != "PS006" {
		t.Errorf("a drop of a queue with a prediction that was not reported: %q, want PS006", code)
	}
	exec(t, c, `UPDATE penstock.prediction SET notified_at = now()`)
	if code := drop(); code != "" {
		t.Errorf("a drop of a queue whose clients were told: %q", code)
	}
}
