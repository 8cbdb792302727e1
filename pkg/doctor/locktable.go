package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// locksSQL reads the number of queues, of their tables and indexes together, which a statement over all queues locks,
// and the settings from which the server computed the size of its lock table when it started.
const locksSQL = `
SELECT count(*)::int - 1, sum(1 + (SELECT count(*) FROM pg_index x WHERE x.indrelid = t.oid))::int,
       current_setting('max_locks_per_transaction')::int,
       current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int
  FROM (SELECT 'penstock.entry'::regclass::oid UNION ALL
        SELECT inhrelid FROM pg_inherits WHERE inhparent = 'penstock.entry'::regclass) t(oid)`

// lockTable is what fills the table of locks that all sessions share, and its size.
type lockTable struct {
	queues, locks  int // locks of a statement over all queues
	perTransaction int // max_locks_per_transaction
	transactions   int // max_connections and max_prepared_transactions
}

// lockStatements is how many statements over all queues the table should have room for.
const lockStatements = 8

func checkLockTable(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var t lockTable
	if err := tx.QueryRow(ctx, locksSQL).Scan(&t.queues, &t.locks, &t.perTransaction, &t.transactions); err != nil {
		return Finding{}, err
	}
	return t.judge(), nil
}

// judge compares the locks of statements over all queues with those for which the server has reserved memory. Beyond
// them it takes memory that is reserved for other purposes, as long as there is any.
func (t lockTable) judge() Finding {
	places := t.perTransaction * t.transactions
	f := Finding{
		Summary: fmt.Sprintf("a statement over all %d queues takes %d locks, of %d", t.queues, t.locks, places),
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
		"statements at a time sessions get no lock (out of shared memory, SQLSTATE 53200). Or have fewer queues: "+
		"flows and shards divide one.", needed, lockStatements)
	return f
}
