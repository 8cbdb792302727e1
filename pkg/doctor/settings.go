package doctor

import (
	"context"
	"fmt"
	"strings"

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
	type setting struct{ Value, Place string }
	found, err := pgx.CollectRows(postgres.Query(ctx, tx, settingsSQL, name), pgx.RowToStructByPos[setting])
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
