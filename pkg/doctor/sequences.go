package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// sequencesSQL has a line for each sequence that is behind numbers that it gave out. Sequences are read after the
// snapshot of the tables, and so are never behind them by work that goes on.
const sequencesSQL = `
SELECT format('%s is at %s, and there is %s', s.name, s.at, s.most), true
  FROM (SELECT 'entry_id_seq', coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0),
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
               (SELECT max(term) FROM penstock.leader)) s(name, at, most)
 WHERE s.most > s.at`

// checkSequences finds sequences that did not come with the rows: logical replication leaves them out.
func checkSequences(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, sequencesSQL, "ahead of all ids, tokens and terms",
		"sequences that are behind what they gave out: %d",
		"Stop all programs and producers, and set them ahead by the statement of \"Backup and restore\" in "+
			"docs/operations.md: ids of entries are given out again, and tokens, by which workers take a new run for "+
			"an old one. Logical replication copies no sequence.")
}
