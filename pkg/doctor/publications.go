package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// publicationsSQL has a line for each publication of updates or deletes that has tables of the schema without a replica
// identity: Postgres refuses to update and delete their rows. Partitions are named by the table that they are of.
const publicationsSQL = `
SELECT format('publication %I: %s', p.pubname,
              (SELECT string_agg(DISTINCT of.relname, ', ') FROM unnest(array_agg(c.oid)) part(oid)
                 JOIN pg_class of ON of.oid = coalesce(pg_partition_root(part.oid), part.oid)))
  FROM pg_publication p
  JOIN pg_publication_tables t ON t.pubname = p.pubname AND t.schemaname = 'penstock'
  JOIN pg_class c ON c.relnamespace = to_regnamespace('penstock') AND c.relname = t.tablename
 WHERE (p.pubupdate OR p.pubdelete)
   AND (c.relreplident = 'n'
        OR c.relreplident = 'd' AND NOT EXISTS (
           SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary))
 GROUP BY p.pubname ORDER BY p.pubname`

func checkPublications(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	lines, err := texts(ctx, tx, publicationsSQL)
	if err != nil || len(lines) == 0 {
		return Finding{Summary: "no table of Penstock is kept from changes by a publication"}, err
	}
	return Finding{
		Severity: Critical, Details: lines,
		Summary: "tables of Penstock without a primary key are published: Postgres refuses to update and delete " +
			"their rows",
		Advice: "DROP PUBLICATION, and make it again for the tables of applications alone (FOR TABLE, FOR TABLES IN " +
			"SCHEMA): until then retention, retries of failures and weights of flows end with SQLSTATE 55000.",
	}, nil
}
