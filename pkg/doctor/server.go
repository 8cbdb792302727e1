package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// versionMin is the oldest Postgres whose behaviour the schema relies on; CI runs on 15 and newer.
const versionMin = 15

func checkVersion(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var number int
	var text string
	err := tx.QueryRow(ctx, `
SELECT current_setting('server_version_num')::int, current_setting('server_version')`).Scan(&number, &text)
	if err != nil {
		return Finding{}, err
	}
	f := Finding{Summary: "Postgres " + text}
	if number < versionMin*10_000 {
		f.Severity, f.Advice = Critical, fmt.Sprintf("Upgrade to Postgres %d or newer; nothing older is tested.",
			versionMin)
	}
	return f, nil
}

const durabilitySQL = `
SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'),
       current_setting('synchronous_standby_names') <> ''`

// unloggedSQL has a line for each table and sequence of the schema that a crash of the server resets.
const unloggedSQL = `
SELECT format('penstock.%I is unlogged', relname)
  FROM pg_class
 WHERE relnamespace = to_regnamespace('penstock') AND relkind IN ('r', 'S') AND relpersistence = 'u'
 ORDER BY relname COLLATE "C"`

// A claim that was acknowledged and then lost in a crash hands out its token again: two runs of an entry would hold
// the same token, and fencing fails. So an asynchronous commit is as bad as no fsync. With a synchronous standby, a
// commit that does not wait for it is lost in the same way when the standby is promoted.
func checkDurability(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var fsync, pages, commit string
	var synchronous bool
	if err := tx.QueryRow(ctx, durabilitySQL).Scan(&fsync, &pages, &commit, &synchronous); err != nil {
		return Finding{}, err
	}
	losesCommits := func(value string) bool { return isOff(value) || synchronous && strings.EqualFold(value, "local") }
	overrides, err := settingsThat(ctx, tx, "synchronous_commit", losesCommits)
	if err != nil {
		return Finding{}, err
	}
	unlogged, err := texts(ctx, tx, unloggedSQL)
	if err != nil {
		return Finding{}, err
	}
	f := Finding{
		Summary: fmt.Sprintf("fsync %s, full_page_writes %s, synchronous_commit %s", fsync, pages, commit),
		Details: append(overrides, unlogged...),
	}
	if synchronous {
		f.Summary += ", with a synchronous standby"
	}
	var todo []string
	if fsync == "off" {
		todo = append(todo, "ALTER SYSTEM SET fsync = on: without it a crash of the machine loses or corrupts the "+
			"database.")
	}
	if pages == "off" {
		todo = append(todo, "ALTER SYSTEM SET full_page_writes = on: a torn page cannot be repaired without it.")
	}
	if commit == "off" {
		todo = append(todo, "Set synchronous_commit to on: with off a crash hands out fencing tokens twice and "+
			"loses accepted entries.")
	}
	const reload = " Then SELECT pg_reload_conf()."
	switch {
	case len(todo) > 0:
		f.Severity = Critical
		f.Advice = strings.Join(todo, " ") + reload
	case synchronous && commit == "local":
		f.Severity = Warning
		f.Advice = "Set synchronous_commit to on: with local no commit waits for the standby of " +
			"synchronous_standby_names, so that its promotion hands out fencing tokens twice and loses accepted " +
			"entries." + reload
	case len(overrides) > 0:
		f.Severity = Warning
		f.Advice = "If leaders, task nodes or pushers connect so, take it away with ALTER ROLE ... RESET " +
			"synchronous_commit (or ALTER DATABASE)."
		if synchronous {
			f.Advice += " Their commits are lost when the synchronous standby is promoted."
		}
	}
	if len(unlogged) > 0 {
		f.Severity = Critical
		f.Advice = strings.TrimSpace(f.Advice + " ALTER TABLE, or ALTER SEQUENCE, NAME SET LOGGED, as the owner: a " +
			"crash of the server empties what is unlogged, entries too, and a standby does not have it.")
	}
	return f, nil
}

// byDutySQL reads whether this session is read-only by default because its role is, and whether that role has a duty.
const byDutySQL = `
SELECT s.source IN ('user', 'database user') AND NOT me.rolsuper AND EXISTS (
       SELECT FROM penstock.database_role r JOIN pg_roles duty ON duty.rolname = r.role
        WHERE pg_has_role(duty.oid, 'MEMBER'))
  FROM pg_settings s JOIN pg_roles me ON me.rolname = current_user
 WHERE s.name = 'default_transaction_read_only'`

// readOnlyRoles returns the places at which roles with one of the duties are read-only by default.
func readOnlyRoles(ctx context.Context, tx pgx.Tx, duties ...string) ([]string, error) {
	return settingsOf(ctx, tx, dutySettingsSQL, "default_transaction_read_only",
		func(value string) bool { return !isOff(value) }, duties)
}

// checkReadOnlyRoles looks for roles with a duty that writes whose transactions are read-only by default.
func checkReadOnlyRoles(ctx context.Context, tx pgx.Tx) (Finding, error) {
	programs, err := readOnlyRoles(ctx, tx, "leader", "node", "gateway", "push")
	if err != nil {
		return Finding{}, err
	}
	if len(programs) > 0 {
		return Finding{
			Severity: Critical, Details: programs,
			Summary: "transactions of programs are read-only by default",
			Advice: "Reset default_transaction_read_only there: programs end sessions that cannot write, and work " +
				"once they have connected anew.",
		}, nil
	}
	operators, err := readOnlyRoles(ctx, tx, "operator")
	if err != nil || len(operators) == 0 {
		return Finding{}, err
	}
	return Finding{
		Severity: Warning, Details: operators,
		Summary: "transactions of operators are read-only by default",
		Advice: "No program stops, but operators with such a role change nothing until they set " +
			"default_transaction_read_only to off. Reset it there, or give them the duty read.",
	}, nil
}

func checkIsolation(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var isolation, readOnly string
	var replica, duties, byDuty bool
	err := tx.QueryRow(ctx, `
		SELECT current_setting('default_transaction_isolation'), current_setting('default_transaction_read_only'),
		       pg_is_in_recovery(),
		       EXISTS (SELECT FROM pg_class
		                WHERE relnamespace = to_regnamespace('penstock') AND relname = 'database_role')`).
		Scan(&isolation, &readOnly, &replica, &duties)
	if err != nil {
		return Finding{}, err
	}
	if duties && readOnly == "on" {
		if err := tx.QueryRow(ctx, byDutySQL).Scan(&byDuty); err != nil {
			return Finding{}, err
		}
	}
	switch {
	case replica:
		return Finding{
			Severity: Critical, Summary: "this is a standby: it cannot be written to",
			Advice: "Point Penstock at the primary (target_session_attrs=read-write in the address).",
		}, nil
	case readOnly == "on" && !byDuty: // a role with a duty is judged by that
		return Finding{
			Severity: Critical, Summary: "transactions are read-only by default",
			Advice: "Find out why default_transaction_read_only was set (a full disk?), then reset it.",
		}, nil
	case isolation != "read committed":
		return Finding{
			Severity: Critical, Summary: "transactions are " + isolation +
				" by default; the queue needs read committed",
			Advice: "Reset default_transaction_isolation for the roles of Penstock.",
		}, nil
	}
	overrides, err := settingsThat(ctx, tx, "default_transaction_isolation",
		func(value string) bool { return !strings.EqualFold(value, "read committed") })
	if err != nil {
		return Finding{}, err
	}
	if duties { // else there is no schema, as another check says
		if f, err := checkReadOnlyRoles(ctx, tx); err != nil || f.Severity != "" {
			return f, err
		}
	}
	if len(overrides) > 0 {
		return Finding{
			Severity: Warning, Details: overrides, Summary: "not every session is read committed by default",
			Advice: "Reset default_transaction_isolation there: programs behind a pooler do not start with it, and " +
				"handlers that finish an entry in a transaction of their own are refused.",
		}, nil
	}
	return Finding{Summary: "a primary, read committed by default"}, nil
}

// skewMax is how far this machine's clock may be from the database's: due times and deadlines set
// by clients here are off by as much. Leases do not depend on it.
const skewMax = 2 * time.Second

func checkClock(ctx context.Context, tx pgx.Tx, cfg Config) (Finding, error) {
	best := time.Hour
	var skew time.Duration
	for range 3 {
		var theirs time.Time
		before, began := cfg.Now(), time.Now()
		if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&theirs); err != nil {
			return Finding{}, err
		}
		if trip := time.Since(began); trip < best {
			best, skew = trip, before.Add(trip/2).Sub(theirs)
		}
	}
	f := Finding{Summary: fmt.Sprintf("this machine and the database differ by %s (give or take %s)",
		skew.Abs().Round(time.Millisecond), (best / 2).Round(time.Millisecond))}
	if skew.Abs() > skewMax+best/2 {
		f.Severity = Warning
		f.Summary = fmt.Sprintf("this machine's clock is %s %s the database's", skew.Abs().Round(time.Millisecond),
			map[bool]string{true: "ahead of", false: "behind"}[skew > 0])
		f.Advice = "Start a time service (chrony, systemd-timesyncd) on both; until then due times and deadlines " +
			"that are set here are off by as much."
	}
	return f, nil
}

// connectionsMany is the share of connections in use from which on a program that restarts may get none.
const connectionsMany = 0.8

const connectionsSQL = `
SELECT (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend'),
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       ARRAY(SELECT format('%s by %s', count(*), coalesce(nullif(application_name, ''), 'no name'))
               FROM pg_stat_activity
              WHERE backend_type = 'client backend'
              GROUP BY application_name
              ORDER BY count(*) DESC, application_name
              LIMIT 5)`

// limitedSQL reads the limits of this database and of the roles of Penstock's programs: those with a duty, those of
// their sessions in this database, and that of this session. Superusers are left out, whose connections no limit
// counts. The sessions of a role count in all databases.
const limitedSQL = `
SELECT format('%s of %s of %s', u.used, l.most, l.place), u.used::float8 / greatest(l.most, 1)
  FROM (SELECT 'database ' || datname AS place, datconnlimit AS most, oid AS database, NULL::oid AS role
          FROM pg_database WHERE datname = current_database()
         UNION ALL
        SELECT 'role ' || r.rolname, r.rolconnlimit, NULL, r.oid FROM pg_roles r
         WHERE NOT r.rolsuper
           AND (r.rolname = current_user
                OR r.rolname IN (SELECT d.role FROM penstock.database_role d)
                OR r.oid IN (SELECT a.usesysid FROM pg_stat_activity a
                              WHERE a.datname = current_database() AND a.application_name LIKE 'penstock%'))) l
 CROSS JOIN LATERAL (
       SELECT count(*) AS used FROM pg_stat_activity a
        WHERE a.backend_type = 'client backend' AND (a.datid = l.database OR a.usesysid = l.role)) u
 WHERE l.most >= 0 AND u.used > 0
 ORDER BY 2 DESC, 1`

// checkConnections compares the connections in use with max_connections, and with the limits of this database and of
// Penstock's roles, which managed servers set far below it.
func checkConnections(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var used, most int
	var who []string
	if err := tx.QueryRow(ctx, connectionsSQL).Scan(&used, &most, &who); err != nil {
		return Finding{}, err
	}
	type limit struct {
		Text  string
		Share float64
	}
	limits, err := pgx.CollectRows(postgres.Query(ctx, tx, limitedSQL), pgx.RowToStructByPos[limit])
	if err != nil {
		return Finding{}, fmt.Errorf("read limits of connections: %w", err)
	}
	f := Finding{Summary: fmt.Sprintf("%d of %d in use", used, most)}
	fullest := float64(used) / float64(max(most, 1))
	const pool = "put a pooler in transaction mode in between (--database-pooled): Penstock works through one."
	if fullest > connectionsMany {
		f.Details, f.Advice = who, "Raise max_connections, or "+pool
	}
	for _, l := range limits {
		if l.Share > connectionsMany {
			f.Details = append(f.Details, l.Text)
			f.Advice = "Raise the limit (ALTER ROLE or ALTER DATABASE ... CONNECTION LIMIT, max_connections), or " +
				pool
		}
		fullest = max(fullest, l.Share)
	}
	switch {
	case fullest > 0.95:
		f.Severity = Critical
	case fullest > connectionsMany:
		f.Severity = Warning
	}
	return f, nil
}

// checkPublic: sessions of Penstock do not search public, but those behind a pooler and those of
// psql may.
func checkPublic(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var open bool
	const sql = `SELECT coalesce(has_schema_privilege('public', to_regnamespace('public')::oid, 'CREATE'), false)`
	if err := tx.QueryRow(ctx, sql).Scan(&open); err != nil {
		return Finding{}, err
	}
	if open {
		return Finding{
			Severity: Warning, Summary: "every role may create functions and tables in schema public",
			Advice: "REVOKE CREATE ON SCHEMA public FROM PUBLIC: what a role puts there can stand in for functions " +
				"that others call without a schema.",
		}, nil
	}
	return Finding{Summary: "not every role may create things there"}, nil
}

func checkNotifications(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var usage float64
	if err := tx.QueryRow(ctx, `SELECT pg_notification_queue_usage()`).Scan(&usage); err != nil {
		return Finding{}, err
	}
	f := Finding{Summary: fmt.Sprintf("the queue of NOTIFY is %.0f %% full", usage*100)}
	if usage > 0.1 {
		f.Severity = Warning
		if usage > 0.5 {
			f.Severity = Critical
		}
		f.Advice = "A session that listens is stuck in a transaction: end it (see horizon). When the queue is full " +
			"notifications are left out, " +
			"and nodes find their work by polling."
	}
	return f, nil
}
