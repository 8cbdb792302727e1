package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// horizonSQL lists the transactions, slots and standbys that keep vacuum from removing dead rows,
// the worst first: age and advice in one line each, and whether it is critical. The snapshot of a VACUUM keeps no other
// one from cleaning.
const horizonSQL = `
SELECT line || ': ' || advice, level = 2 FROM (
    SELECT format('session %s of %s (%s), in a transaction for %s, %s', pid, usename,
           coalesce(nullif(application_name, ''), 'no name'),
                  penstock.ago(clock_timestamp() - xact_start), coalesce(state, 'state unknown')) AS line,
           CASE WHEN clock_timestamp() - xact_start > interval '10 minutes' THEN 2 ELSE 1 END AS level,
           'SELECT pg_terminate_backend(' || pid || ')' AS advice,
                  extract(epoch FROM clock_timestamp() - xact_start) AS rank
      FROM pg_stat_activity
     WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND backend_type <> 'walsender'
       AND datname = current_database() AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
       AND xact_start < clock_timestamp() - interval '1 minute'
    UNION ALL
    SELECT format('prepared transaction %L of %s, for %s', gid, owner, penstock.ago(clock_timestamp() - prepared)),
           CASE WHEN clock_timestamp() - prepared > interval '10 minutes' THEN 2 ELSE 1 END,
           format('ROLLBACK PREPARED %L', gid), extract(epoch FROM clock_timestamp() - prepared)
      FROM pg_prepared_xacts
     WHERE database = current_database() AND prepared < clock_timestamp() - interval '1 minute'
    UNION ALL
    SELECT format('replication slot %L, %s, %s transactions behind%s', slot_name, CASE WHEN active THEN 'active'
           ELSE 'not active' END,
                  greatest(age(xmin), age(catalog_xmin)), coalesce(', holds ' || pg_size_pretty(kept), '')),
           CASE WHEN NOT active AND (kept > 10737418240 OR greatest(age(xmin), age(catalog_xmin)) > 10000000) THEN 2
                  ELSE 1 END,
           CASE WHEN active THEN 'see why its reader is slow'
                  ELSE format('SELECT pg_drop_replication_slot(%L), if not needed', slot_name) END,
           greatest(age(xmin), age(catalog_xmin), 0)
      FROM pg_replication_slots
     CROSS JOIN LATERAL (SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_wal_lsn_diff(pg_current_wal_lsn(),
            restart_lsn) END AS kept) w
     WHERE greatest(age(xmin), age(catalog_xmin)) > 100000 OR (NOT active AND kept > 1073741824)
    UNION ALL
    SELECT format('standby %L with hot_standby_feedback, %s transactions behind', coalesce(nullif(application_name, ''),
           host(client_addr), pid::text), age(backend_xmin)), 1, 'end the long query on the standby', age(backend_xmin)
      FROM pg_stat_replication
     WHERE age(backend_xmin) > 100000) h
 ORDER BY level DESC, rank DESC
 LIMIT 20`

// An old xmin horizon is the commonest reason why a queue in Postgres becomes slow: dead ready rows
// accumulate at the head of each lane. Claims start from the low-water mark, so they stay fast; the
// tables grow all the same.
func checkHorizon(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, horizonSQL, "nothing keeps vacuum from cleaning",
		"dead rows cannot be removed, and tables grow; what holds the horizon: %d",
		"End the sessions named here, and set idle_in_transaction_session_timeout for their roles.")
}

func checkWraparound(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var age int64
	if err := tx.QueryRow(ctx, `SELECT max(age(datfrozenxid))::bigint FROM pg_database`).Scan(&age); err != nil {
		return Finding{}, err
	}
	f := Finding{Summary: fmt.Sprintf("the oldest database is %.1f million transactions old, of 2,147",
		float64(age)/1e6)}
	if age > 1_000_000_000 {
		f.Severity = Warning
		if age > 1_600_000_000 {
			f.Severity = Critical
		}
		f.Advice = "VACUUM (FREEZE) is not keeping up: end what holds the horizon, then vacuum the oldest tables by " +
			"hand. At the end Postgres refuses writes."
	}
	return f, nil
}

// deadSQL lists tables with many dead rows, more than half the number of live ones.
const deadSQL = `
SELECT format('%s: %s dead rows, %s live, %s; vacuumed %s', relname, n_dead_tup, n_live_tup,
       pg_size_pretty(pg_total_relation_size(relid)),
              coalesce(penstock.ago(clock_timestamp() - greatest(last_vacuum, last_autovacuum)) || ' ago', 'never')),
                     n_dead_tup > 2000000
  FROM pg_stat_user_tables
 WHERE schemaname = 'penstock' AND n_dead_tup > 100000 AND n_dead_tup > n_live_tup / 2
 ORDER BY n_dead_tup DESC
 LIMIT 20`

// idleSQL lists the settings that switch autovacuum off: of the server, or of a table.
const idleSQL = `
SELECT 'autovacuum is off' WHERE current_setting('autovacuum') = 'off'
UNION ALL
SELECT 'track_counts is off: autovacuum is blind, and rates are unknown' WHERE current_setting('track_counts') = 'off'
UNION ALL
SELECT 'autovacuum is off for table ' || c.oid::regclass
  FROM pg_class c
 WHERE c.relnamespace = 'penstock'::regnamespace AND 'autovacuum_enabled=false' = ANY (c.reloptions)`

func checkVacuum(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	off, err := texts(ctx, tx, idleSQL)
	if err != nil {
		return Finding{}, err
	}
	if len(off) > 0 {
		return Finding{
			Severity: Critical, Summary: "autovacuum does not run everywhere", Details: off,
			Advice: "Switch it on; a queue's tables change too fast to be vacuumed by hand.",
		}, nil
	}
	return judged(ctx, tx, deadSQL, "no table has more dead rows than it should", "tables with many dead rows: %d",
		"See horizon first; if nothing holds it, autovacuum is too slow: lower autovacuum_naptime to 10s, raise "+
			"autovacuum_max_workers, or VACUUM them now.")
}

// partitionsSQL reads for each parent its number of partitions, their last day, and whether its
// default partition, which is never dropped, has rows.
const partitionsSQL = `
SELECT p.name, count(c.oid), max(substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''([^'']+)''\)')::timestamptz),
       CASE p.name WHEN 'result' THEN EXISTS (SELECT FROM penstock.result_default)
              ELSE EXISTS (SELECT FROM penstock.failure_default) END
  FROM (VALUES ('result'), ('failure')) p(name)
  LEFT JOIN pg_inherits i ON i.inhparent = ('penstock.' || p.name)::regclass
  LEFT JOIN pg_class c ON c.oid = i.inhrelid AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT'
 GROUP BY p.name
 ORDER BY p.name`

func checkPartitions(ctx context.Context, tx pgx.Tx, cfg Config) (Finding, error) {
	type parent struct {
		name  string
		n     int
		until *time.Time
		spill bool
	}
	parents, err := pgx.CollectRows(postgres.Query(ctx, tx, partitionsSQL),
		func(row pgx.CollectableRow) (parent, error) {
			var p parent
			return p, row.Scan(&p.name, &p.n, &p.until, &p.spill)
		})
	if err != nil {
		return Finding{}, err
	}
	f := Finding{}
	for _, p := range parents {
		ahead := p.until != nil && p.until.Sub(cfg.Now()).Hours() >= 24
		line := p.name + " has no partitions yet"
		if p.until != nil {
			line = fmt.Sprintf("%s has %d partitions, until %s", p.name, p.n, p.until.UTC().Format("2006-01-02"))
		}
		f.Details = append(f.Details, line)
		if (p.n > 0 && !ahead) || (p.n == 0 && p.spill) {
			f.Severity = Warning
			f.Advice = "The elected leader makes partitions a few days ahead: see that one leads. Rows that found " +
				"no partition are removed one by one."
		}
	}
	f.Summary = map[Severity]string{
		"":      "outcomes and failures have partitions for what is to come",
		Warning: "partitions for tomorrow are missing",
	}[f.Severity]
	if f.Severity == "" && parents[0].n == 0 && parents[1].n == 0 {
		f.Summary = "no partitions, and nothing stored yet"
	}
	return f, nil
}
