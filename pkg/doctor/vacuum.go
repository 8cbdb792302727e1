package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
 ORDER BY level DESC, rank DESC`

// An old xmin horizon is the commonest reason why a queue in Postgres becomes slow: dead ready rows
// accumulate at the head of each lane. Claims start from the low-water mark, so they stay fast; the
// tables grow all the same.
func checkHorizon(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, horizonSQL, "nothing keeps vacuum from cleaning",
		"dead rows cannot be removed, and tables grow; what holds the horizon: %d",
		"End the sessions named here, and set idle_in_transaction_session_timeout for their roles.")
}

// Multixacts are numbers of sets of transactions that lock a row together, and wrap around as those of transactions do.
const agesSQL = `
SELECT max(age(datfrozenxid))::bigint, max(mxid_age(datminmxid))::bigint FROM pg_database`

func checkWraparound(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var transactions, multixacts int64
	if err := tx.QueryRow(ctx, agesSQL).Scan(&transactions, &multixacts); err != nil {
		return Finding{}, err
	}
	return judgeAges(transactions, multixacts), nil
}

func judgeAges(transactions, multixacts int64) Finding {
	f := Finding{Summary: fmt.Sprintf("the oldest database is %.1f million transactions and %.1f million multixacts "+
		"old, of 2,147", float64(transactions)/1e6, float64(multixacts)/1e6)}
	if age := max(transactions, multixacts); age > 1_000_000_000 {
		f.Severity = Warning
		if age > 1_600_000_000 {
			f.Severity = Critical
		}
		f.Advice = "VACUUM (FREEZE) is not keeping up: end what holds the horizon, then vacuum the oldest tables by " +
			"hand. At the end Postgres refuses writes."
	}
	return f
}

// deadSQL lists tables with many dead rows, more than half the number of live ones.
const deadSQL = `
SELECT format('%s: %s dead rows, %s live, %s; vacuumed %s', relname, n_dead_tup, n_live_tup,
       pg_size_pretty(pg_total_relation_size(relid)),
              coalesce(penstock.ago(clock_timestamp() - greatest(last_vacuum, last_autovacuum)) || ' ago', 'never')),
                     n_dead_tup > 2000000
  FROM pg_stat_user_tables
 WHERE schemaname = 'penstock' AND n_dead_tup > 100000 AND n_dead_tup > n_live_tup / 2
 ORDER BY n_dead_tup DESC`

// idleSQL lists the settings that switch autovacuum off: of the server, or of a table.
const idleSQL = `
SELECT 'autovacuum is off' WHERE current_setting('autovacuum') = 'off'
UNION ALL
SELECT 'track_counts is off: autovacuum is blind, and rates are unknown' WHERE current_setting('track_counts') = 'off'
UNION ALL
SELECT 'autovacuum is off for table ' || c.oid::regclass
  FROM pg_class c
 WHERE c.relnamespace = 'penstock'::regnamespace
   AND EXISTS (SELECT FROM pg_options_to_table(c.reloptions) o
                WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean)`

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

// partitionsSQL reads for each table that is dropped by the day the days that have a partition, and whether it has a
// default partition, and rows in it.
const partitionsSQL = `
SELECT p.parent,
       array_agg(to_char(to_date(right(c.relname, 8), 'YYYYMMDD'), 'YYYY-MM-DD') ORDER BY c.relname)
           FILTER (WHERE c.relname ~ '_[0-9]{8}$'),
       to_regclass(format('penstock.%I', p.parent || '_default')) IS NOT NULL,
       CASE p.parent WHEN 'result' THEN EXISTS (SELECT FROM penstock.result_default)
                     WHEN 'failure' THEN EXISTS (SELECT FROM penstock.failure_default) ELSE false END
  FROM penstock.retention p
  LEFT JOIN pg_inherits i ON i.inhparent = to_regclass(format('penstock.%I', p.parent))
  LEFT JOIN pg_class c ON c.oid = i.inhrelid
 GROUP BY p.parent
 ORDER BY p.parent`

// dailyTable is a table with a partition for each day, in UTC.
type dailyTable struct {
	Name    string
	Days    []string // as in day, in order
	Default bool     // it has a partition for rows of other days
	Spilled bool     // which has rows
}

// day is the form of a day in findings.
const day = time.DateOnly

// missing returns the days for which the table needs a partition and has none: tomorrow, and where there is no default
// partition today. The default partition may have got the first rows of today before the first leader.
func (t dailyTable) missing(now time.Time) (days []string) {
	now = now.UTC()
	tomorrow := now.AddDate(0, 0, 1).Format(day)
	needed := []string{tomorrow}
	if !t.Default {
		needed = []string{now.Format(day), tomorrow}
	}
	for _, d := range needed {
		if !slices.Contains(t.Days, d) {
			days = append(days, d)
		}
	}
	return days
}

func (t dailyTable) String() string {
	if len(t.Days) == 0 {
		return t.Name + " has no partitions yet"
	}
	return fmt.Sprintf("%s has %d partitions, until the end of %s", t.Name, len(t.Days), t.Days[len(t.Days)-1])
}

func checkPartitions(ctx context.Context, tx pgx.Tx, cfg Config) (Finding, error) {
	tables, err := pgx.CollectRows(postgres.Query(ctx, tx, partitionsSQL), pgx.RowToStructByPos[dailyTable])
	if err != nil {
		return Finding{}, err
	}
	// Before the first leader no table has partitions, and nothing needs them.
	used := slices.ContainsFunc(tables, func(t dailyTable) bool { return len(t.Days) > 0 || t.Spilled })
	if !used {
		return Finding{Summary: "no partitions, and nothing stored yet"}, nil
	}
	f := Finding{Summary: "each table that is dropped by the day has partitions for what is to come"}
	for _, t := range tables {
		line := t.String()
		if days := t.missing(cfg.Now()); len(days) > 0 {
			f.Severity = Warning
			line += ", without " + strings.Join(days, " and ")
		}
		f.Details = append(f.Details, line)
	}
	if f.Severity == Warning {
		f.Summary = "partitions for today or tomorrow are missing"
		f.Advice = "The elected leader makes partitions a few days ahead: see that one leads. Rows without one go to " +
			"a default partition, which is never dropped; samples have none and are not stored."
	}
	return f, nil
}
