package doctor

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// The judgement counts the locks that Postgres takes for a statement over all queues.
func TestLocksOfAStatementOverAllQueuesAreCounted(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.create_queue('q' || n) FROM generate_series(1, 5) n`)
	var table lockTable // of entries
	var locks int
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		exec(t, tx, `SELECT FROM penstock.entry WHERE id = 1`)
		if err := tx.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_locks l LEFT JOIN pg_index x ON x.indexrelid = l.relation
			  JOIN pg_class c ON c.oid = coalesce(x.indrelid, l.relation)
			 WHERE l.pid = pg_backend_pid() AND c.relname ~ '^entry' AND c.relnamespace = 'penstock'::regnamespace`).Scan(&locks); err != nil {
			return err
		}
		tables, err := lockTables(t.Context(), tx)
		for _, other := range tables {
			if other.parent == "entry" {
				table = other
			}
		}
		return err
	})
	// Before Postgres 16 the index of the partitioned table itself is not locked.
	if err != nil || table.locks-locks < 0 || table.locks-locks > 1 || table.partitions < 5 {
		t.Fatalf("%+v is counted, and %d locks are taken (%v)", table, locks, err)
	}
	each := table.locks / table.partitions
	for queues, severity := range map[int]Severity{5: "", 75: "", 100: Warning, 600: Warning, 1000: Critical} {
		f := lockTable{parent: "entry", partitions: queues, locks: queues * each, perTransaction: 64, transactions: 100}.judge()
		if f.Severity != severity || (severity != "") != strings.Contains(f.Advice, "max_locks_per_transaction") {
			t.Errorf("%d queues with %d locks each: %+v", queues, each, f)
		}
	}
	f := lockTable{parent: "entry", partitions: 999, locks: 10000, perTransaction: 64, transactions: 100}.judge()
	if !strings.Contains(f.Advice, " = 832,") {
		t.Errorf("8 statements of 10,000 locks in 100 sessions: %s", f.Advice)
	}
}

// A look-up of an ended entry locks each day of failures: with a retention of two years they are more than many queues.
func TestDaysOfFailuresAreCountedWhereTheyAreMoreThanQueues(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `DO $$ BEGIN FOR n IN 1..40 LOOP
		EXECUTE format('CREATE TABLE penstock.failure_old_%s PARTITION OF penstock.failure FOR VALUES FROM (%L) TO (%L)',
		               n, '1990-01-01'::date + n, '1990-01-02'::date + n); END LOOP; END $$`)
	want(t, find(t, pool, "lock table", Config{}), Fine, "days of failures takes")
	f := lockTable{parent: "failure", partitions: 738, locks: 2952, perTransaction: 64, transactions: 100}.judge()
	if f.Severity != Warning || !strings.Contains(f.Advice, "failure_retention") {
		t.Errorf("two years of failures: %+v", f)
	}
	exec(t, pool, `DO $$ BEGIN FOR n IN 1..100 LOOP
		EXECUTE format('CREATE TABLE penstock.output_old_%s PARTITION OF penstock.output FOR VALUES FROM (%L) TO (%L)',
		               n, '1990-01-01'::date + n, '1990-01-02'::date + n); END LOOP; END $$`)
	want(t, find(t, pool, "lock table", Config{}), Fine, "hours of output takes")
}
