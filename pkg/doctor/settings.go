package doctor

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// settingsSQL reads the values of setting $1 that roles and this database have, as they were written.
const settingsSQL = `
SELECT o.value, format('%s=%s of %s%s', o.name, o.value,
                       coalesce('role ' || nullif(s.setrole, 0)::regrole::text, 'every role'),
                       coalesce(' in database ' || d.datname, '')) AS place
  FROM pg_db_role_setting s
 CROSS JOIN unnest(s.setconfig) option
 CROSS JOIN LATERAL (SELECT split_part(option, '=', 1) AS name, substr(option, strpos(option, '=') + 1) AS value) o
  LEFT JOIN pg_database d ON d.oid = s.setdatabase
 WHERE o.name = $1 AND (s.setdatabase = 0 OR d.datname = current_database())`

// dutySettingsSQL is settingsSQL without those of roles that have none of the duties $2, and of superusers.
const dutySettingsSQL = settingsSQL + `
   AND (s.setrole = 0 OR EXISTS (
        SELECT FROM penstock.database_role r JOIN pg_roles duty ON duty.rolname = r.role
         WHERE r.duty = ANY ($2) AND pg_has_role(s.setrole, duty.oid, 'MEMBER'))
       AND NOT (SELECT rolsuper FROM pg_roles WHERE oid = s.setrole))`

// A session that overrides a setting does not see the server's own value: only the files have it, and few roles may
// read those.
const (
	readsFilesSQL = `
SELECT has_table_privilege('pg_file_settings', 'SELECT')
   AND has_function_privilege('pg_show_all_file_settings()', 'EXECUTE')`

	fileSettingSQL = `
SELECT setting, format('%s=%s of the server (%s, line %s)', name, setting, sourcefile, sourceline)
  FROM pg_file_settings WHERE name = $1 AND applied`
)

// settingsThat returns the places at which a role, this database or the server's files give the setting a value that
// is bad.
func settingsThat(ctx context.Context, tx pgx.Tx, name string, bad func(value string) bool) ([]string, error) {
	return settingsOf(ctx, tx, settingsSQL, name, bad)
}

// settingsOf is settingsThat for the roles that sql leaves, whose arguments beyond the name are more.
func settingsOf(
	ctx context.Context, tx pgx.Tx, sql, name string, bad func(value string) bool, more ...any,
) ([]string, error) {
	type setting struct{ Value, Place string }
	found, err := pgx.CollectRows(postgres.Query(ctx, tx, sql, append([]any{name}, more...)...),
		pgx.RowToStructByPos[setting])
	if err != nil {
		return nil, fmt.Errorf("read settings of roles: %w", err)
	}
	var readable bool
	if err := tx.QueryRow(ctx, readsFilesSQL).Scan(&readable); err != nil {
		return nil, fmt.Errorf("read rights on settings: %w", err)
	}
	if readable {
		files, err := pgx.CollectRows(postgres.Query(ctx, tx, fileSettingSQL, name), pgx.RowToStructByPos[setting])
		if err != nil {
			return nil, fmt.Errorf("read settings of the server: %w", err)
		}
		found = append(found, files...)
	}
	var places []string
	for _, s := range found {
		if bad(s.Value) {
			places = append(places, s.Place)
		}
	}
	return places, nil
}

// isOff reports whether Postgres reads a value as off. It takes the abbreviations of a boolean.
func isOff(value string) bool {
	value = strings.ToLower(value)
	return value == "0" || len(value) > 1 && strings.HasPrefix("off", value) ||
		value != "" && (strings.HasPrefix("false", value) || strings.HasPrefix("no", value))
}

// transactionMin is how long transactions of Penstock may take at least.
const transactionMin = time.Minute

// checkSettings looks for settings of roles and databases that no other check knows, and that statements of Penstock
// meet: sessions do not override transaction_timeout, and search_path is that of the role behind a pooler, and in
// sessions of other programs that push or call functions of the schema.
func checkSettings(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var f Finding
	for _, s := range []struct {
		name   string
		bad    func(value string) bool
		advice string
	}{
		{"search_path", hidesPostgres, "Name pg_catalog first in search_path, or leave it out: functions of Penstock " +
			"call those of Postgres by their names, and a schema before pg_catalog hides them. Statements fail then " +
			"with errors about functions that do not exist, or do something else."},
		{"transaction_timeout", endsTransactions, "Set transaction_timeout to 0 for the roles of Penstock, or to a " +
			"minute at least: the server ends sessions whose transaction takes longer."},
	} {
		places, err := settingsThat(ctx, tx, s.name, s.bad)
		if err != nil {
			return Finding{}, err
		}
		if len(places) > 0 {
			f.Severity, f.Details = Warning, append(f.Details, places...)
			f.Advice = strings.TrimSpace(f.Advice + " " + s.advice)
		}
	}
	f.Summary = "no role or database has a search_path or a transaction_timeout that breaks statements"
	if len(f.Details) > 0 {
		f.Summary = fmt.Sprintf("settings of roles, databases or the server that break statements: %d", len(f.Details))
	}
	return f, nil
}

// hidesPostgres reports whether a search_path has a schema before pg_catalog. Where it is not named, it comes first.
// Functions are never searched for in pg_temp.
func hidesPostgres(path string) bool {
	schemas := strings.Split(path, ",")
	for i, s := range schemas {
		schemas[i] = strings.Trim(strings.TrimSpace(s), `"`)
	}
	at := slices.Index(schemas, "pg_catalog")
	return at > 0 && slices.ContainsFunc(schemas[:at], func(s string) bool { return s != "pg_temp" })
}

// lasts is a duration as settings have it; milliseconds if it has no unit.
var lasts = regexp.MustCompile(`^\s*([0-9.]+)\s*(us|ms|s|min|h|d|)\s*$`)

// endsTransactions reports whether a transaction_timeout is shorter than transactions of Penstock may take; 0 is none.
func endsTransactions(timeout string) bool {
	units := map[string]time.Duration{
		"us": time.Microsecond, "": time.Millisecond, "ms": time.Millisecond, "s": time.Second, "min": time.Minute,
		"h": time.Hour, "d": 24 * time.Hour,
	}
	m := lasts.FindStringSubmatch(timeout)
	if m == nil {
		return false
	}
	n, err := strconv.ParseFloat(m[1], 64)
	return err == nil && n > 0 && n*float64(units[m[2]]) < float64(transactionMin)
}

func checkEncoding(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var encoding string
	if err := tx.QueryRow(ctx, `SELECT current_setting('server_encoding')`).Scan(&encoding); err != nil {
		return Finding{}, err
	}
	if encoding != "UTF8" {
		return Finding{
			Severity: Critical, Summary: "the database has the encoding " + encoding,
			Advice: "Payloads are UTF-8: other characters are changed or refused. Create a database with ENCODING " +
				"'UTF8' TEMPLATE template0, and restore a dump into it.",
		}, nil
	}
	return Finding{Summary: "UTF8"}, nil
}
