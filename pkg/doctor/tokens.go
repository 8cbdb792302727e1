package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// expiringSQL lists tokens that end soon or ended a short while ago. Rows of one name are one token: after a rotation
// the last one to end counts. Soon is 30 days, or the last third of the lifetime of a token that is made for less than
// 90 days; a short while is a week, or the lifetime.
const expiringSQL = `
SELECT format(CASE WHEN left_ > interval '0' THEN 'token %s (%s) ends in %s, on %s'
                   ELSE 'token %s (%s) ended %s ago, on %s' END,
              name, array_to_string(scopes, ', '), penstock.ago(greatest(left_, -left_)),
              to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI "UTC"')), false
  FROM (SELECT DISTINCT ON (name) name, scopes, expires_at, expires_at - clock_timestamp() AS left_,
               expires_at - created_at AS lifetime
          FROM penstock.api_token
         WHERE revoked_at IS NULL
         ORDER BY name, expires_at DESC NULLS FIRST, id DESC) t
 WHERE left_ BETWEEN -least(interval '7 days', lifetime) AND least(interval '30 days', lifetime / 3)
 ORDER BY expires_at, name`

func checkTokens(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, expiringSQL, "no token of the API ends soon", "tokens that end soon or have ended: %d",
		"Before the end: penstock token rotate NAME --reason '...', which prints a new secret with the same rights; "+
			"the old one ends after --overlap. After the end: penstock token create NAME --scope SCOPES "+
			"--reason '...'.")
}
