package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// drawnSQL is the last number of each sequence that is no column's own, and the largest that is stored of it.
// Sequences are read after the snapshot of the tables, and so are never behind them by work that goes on.
const drawnSQL = `
SELECT 'entry_id_seq', coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0),
       (SELECT max(greatest(
               (SELECT id FROM penstock.entry WHERE queue_id = q.id ORDER BY id DESC LIMIT 1),
               (SELECT entry_id FROM penstock.result WHERE queue_id = q.id ORDER BY entry_id DESC LIMIT 1),
               (SELECT entry_id FROM penstock.failure WHERE queue_id = q.id ORDER BY entry_id DESC LIMIT 1)))
          FROM penstock.queue q)
 UNION ALL
SELECT 'token_seq', coalesce(pg_sequence_last_value('penstock.token_seq'), 0),
       greatest((SELECT max(token) FROM penstock.lock), (SELECT max(token) FROM penstock.slot))
 UNION ALL
SELECT 'term_seq', coalesce(pg_sequence_last_value('penstock.term_seq'), 0),
       (SELECT max(term) FROM penstock.leader)`

// columnsSQL writes the same for each sequence of a column that the session may read: queues, audit and so on. Their
// columns are primary keys, of which the largest is found at once.
const columnsSQL = `
SELECT coalesce(string_agg(format(
           ' UNION ALL SELECT %L, coalesce(pg_sequence_last_value(%s::oid::regclass), 0), (SELECT max(%I) FROM %I.%I)',
           s.relname, q.seqrelid, a.attname, n.nspname, t.relname), ''), '')
  FROM pg_sequence q
  JOIN pg_class s ON s.oid = q.seqrelid
  JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = q.seqrelid
                  AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('i', 'a')
  JOIN pg_class t ON t.oid = d.refobjid
  JOIN pg_namespace n ON n.oid = t.relnamespace
  JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
 WHERE (n.nspname = 'penstock' OR n.nspname = 'public' AND t.relname = 'penstock_migration')
   AND has_schema_privilege(n.oid, 'USAGE') AND has_sequence_privilege(q.seqrelid, 'SELECT')
   AND has_column_privilege(t.oid, a.attnum, 'SELECT')`

// behindSQL has a line for each sequence of drawn that is behind numbers that it gave out.
func behindSQL(drawn string) string {
	return `
SELECT format('%s is at %s, and there is %s', s.name, s.at, s.most), true
  FROM (` + drawn + `) s(name, at, most)
 WHERE s.most > s.at`
}

// checkSequences finds sequences that did not come with the rows: logical replication leaves them out.
func checkSequences(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var columns string
	if err := tx.QueryRow(ctx, columnsSQL).Scan(&columns); err != nil {
		return Finding{}, fmt.Errorf("read the sequences of columns: %w", err)
	}
	return judged(ctx, tx, behindSQL(drawnSQL+columns), "ahead of all ids, tokens and terms",
		"sequences that are behind what they gave out: %d",
		"Stop all programs and producers, and set all sequences by the statement of \"Logical replication\" in "+
			"docs/operations.md: ids of entries are given out again, and tokens, by which workers take a new run for "+
			"an old one; changes of operators fail with 23505. Logical replication copies no sequence.")
}
