package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// locksSQL reads, for the tables whose partitions a look-up by an id alone reads, the number of partitions, that of
// their tables and indexes together, which such a statement locks, and the settings from which the server computed the
// size of its lock table when it started. Entries have a partition a queue; failures and results one a day; output one
// an hour.
const locksSQL = `
SELECT parent.name, count(*)::int - 1, sum(1 + (SELECT count(*) FROM pg_index x WHERE x.indrelid = t.oid))::int,
       current_setting('max_locks_per_transaction')::int,
       current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int
  FROM unnest('{entry,failure,result,output}'::text[]) parent(name)
 CROSS JOIN LATERAL (SELECT to_regclass('penstock.' || parent.name)::oid UNION ALL
                     SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass('penstock.' || parent.name)) t(oid)
 GROUP BY parent.name
 ORDER BY 3 DESC, 1`

// lockTable is what fills the table of locks that all sessions share, and its size.
type lockTable struct {
	parent         string // entry, failure, result or output
	partitions     int
	locks          int // of a statement over all partitions
	perTransaction int // max_locks_per_transaction
	transactions   int // max_connections and max_prepared_transactions
}

// lockStatements is how many statements over all partitions the table should have room for.
const lockStatements = 8

func checkLockTable(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	tables, err := lockTables(ctx, tx)
	if err != nil {
		return Finding{}, err
	}
	return tables[0].judge(), nil
}

// lockTables returns what each table takes, the one with the most locks first.
func lockTables(ctx context.Context, tx pgx.Tx) ([]lockTable, error) {
	return pgx.CollectRows(postgres.Query(ctx, tx, locksSQL), func(row pgx.CollectableRow) (t lockTable, err error) {
		err = row.Scan(&t.parent, &t.partitions, &t.locks, &t.perTransaction, &t.transactions)
		return t, err
	})
}

// judge compares the locks of statements over all partitions with those for which the server has reserved memory.
// Beyond them it takes memory that is reserved for other purposes, as long as there is any.
func (t lockTable) judge() Finding {
	of, less := "queues", "have fewer queues: flows and shards divide one"
	switch t.parent {
	case "failure", "result":
		of = "days of " + t.parent + "s"
		less = "lower " + t.parent + "_retention of the queues that keep them for longest"
	case "output":
		of = "hours of output"
		less = "lower result_retention of the queues whose output is kept, or have their models keep none (keep_output)"
	}
	places := t.perTransaction * t.transactions
	f := Finding{
		Summary: fmt.Sprintf("a statement over all %d %s takes %d locks, of %d", t.partitions, of, t.locks, places),
	}
	if lockStatements*t.locks <= places {
		return f
	}
	f.Severity = Warning
	if t.locks > places {
		f.Severity = Critical
	}
	const step = 64
	needed := (lockStatements*t.locks/t.transactions/step + 1) * step
	f.Advice = fmt.Sprintf("ALTER SYSTEM SET max_locks_per_transaction = %d, and restart the server: with %d such "+
		"statements at a time sessions get no lock (out of shared memory, SQLSTATE 53200). Or %s.",
		needed, lockStatements, less)
	return f
}
