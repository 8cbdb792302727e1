package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// unsignedSQL lists why secrets could not be read for callbacks that wait, of the first thousand by their due times.
// Nodes hand them back, and they are no failures for 91 hours. The last note of a callback that had an attempt before
// is that of the attempt.
const unsignedSQL = `
SELECT format('%s callbacks, the first since %s: %s', count(*),
              penstock.ago(clock_timestamp() - min((note->>'at')::timestamptz)), left(note->>'error', 200)), false
  FROM (SELECT e.history->-1 AS note
          FROM penstock.entry_webhook e
         WHERE e.status = 'initial'
         ORDER BY e.due_at, e.id
         LIMIT 1000) w
 WHERE note->>'class' = 'secret'
 GROUP BY note->>'error'
 ORDER BY count(*) DESC, note->>'error'`

func checkCallbacks(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, unsignedSQL, "no callback waits for a secret with its first attempt",
		"reasons for which callbacks wait for a secret: %d",
		"Give each task node the key under which the secrets were sealed (tasknode.webhook.key). If it is lost, renew "+
			"the root secret (penstock webhook rotate --overlap 0s), then each secret of a receiver's own.")
}
