package operator

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// holdersSQL names the transactions that have the table of queue $1 open.
const holdersSQL = `
SELECT coalesce(string_agg(format('session %s (%s, %s) that has been in a transaction for %s s: '
                                  'SELECT pg_terminate_backend(%s) ends it',
                                  a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no name'),
                                  extract(epoch FROM clock_timestamp() - a.xact_start)::bigint, a.pid), '; '
                                         ORDER BY a.xact_start), $2)
  FROM pg_stat_activity a
 WHERE a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
   AND a.pid IN (SELECT l.pid FROM pg_locks l
                  WHERE l.granted AND l.relation = to_regclass(format('penstock.%I', 'entry_' || $1)))`

// waited names the transactions for which a change of a queue waited until its timeout; other
// errors pass through.
func (d *Database) waited(ctx context.Context, does, queue string, err error) error {
	if code := postgres.Code(err); code != postgres.LockNotAvailable && code != postgres.QueryCanceled {
		return err
	}
	holder := "a transaction that has the queue open, a push or a backup perhaps; penstock doctor names those that last"
	// On a transaction, which has failed by now, no query can run.
	_ = d.db.QueryRow(ctx, holdersSQL, queue, holder).Scan(&holder)
	return fmt.Errorf("%s queue %q: nothing was changed: the wait for %s timed out; try again later: %w", does, queue,
		holder, invalidation.ErrState)
}
