package migrations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// sessionSQL sets up a session of migrations, whatever the role, the database and the program set for theirs: a bound
// on statements would end a long one, and the texts of migrations and functions are read with these settings. A
// setting that this version of Postgres does not have is left out.
const sessionSQL = `
SELECT set_config(s.name, s.value, false)
  FROM (VALUES ('lock_timeout', $1), ('statement_timeout', '0'), ('transaction_timeout', '0'),
               ('idle_session_timeout', '0'), ('idle_in_transaction_session_timeout', '0'), ('client_encoding', 'UTF8'),
               ('standard_conforming_strings', 'on'), ('default_transaction_isolation', 'read committed'),
               ('IntervalStyle', 'postgres'), ('DateStyle', 'ISO, YMD'), ('quote_all_identifiers', 'off'),
               ('client_min_messages', 'notice')) s(name, value)
  JOIN pg_catalog.pg_settings p ON lower(p.name) = lower(s.name)`

// ownNamesSQL comes before all other statements: a function, an operator or a type of another schema that the role or
// the database searches would take the place of one of Postgres, with the rights of the owner of the schema.
const ownNamesSQL = `SET search_path = pg_catalog, pg_temp`

func setUp(ctx context.Context, c *pgx.Conn) error {
	if _, err := c.Exec(ctx, ownNamesSQL); err != nil {
		return fmt.Errorf("set the search path for migrations: %w", err)
	}
	if _, err := c.Exec(ctx, sessionSQL, fmt.Sprint(lockWait.Milliseconds())); err != nil {
		return fmt.Errorf("set up a session for migrations: %w", err)
	}
	return nil
}

// ownRoleSQL makes a superuser, or a member of the owner of the schema, act as that owner: what it made itself would be
// its own, and the owner could not replace it. Where the table of migrations, a recorded object or a partition belongs
// to another role already, it goes on as it is: the owner could not replace those, and the error takes the role back.
// What was made by hand in the schema may belong to anybody.
const ownRoleSQL = `
DO $$
DECLARE
    schema record;
BEGIN
    SELECT n.oid, n.nspowner AS owner, r.rolname INTO schema
      FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
     WHERE n.nspname = 'penstock' AND r.rolname <> current_user
       AND pg_has_role(r.oid, CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER'
                                   ELSE 'SET' END);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM set_config('search_path', '', true), set_config('role', schema.rolname, false);
    IF EXISTS (SELECT FROM pg_class WHERE oid = to_regclass('` + Table + `') AND relowner <> schema.owner) THEN
        RAISE insufficient_privilege;
    END IF;
    IF to_regclass('penstock.schema_object') IS NULL THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pg_class c
                WHERE c.relnamespace = schema.oid AND c.relkind IN ('r', 'p', 'v', 'S') AND c.relowner <> schema.owner
                  AND (c.relispartition OR EXISTS (
                       SELECT FROM penstock.schema_object s
                        WHERE s.object = CASE c.relkind WHEN 'v' THEN 'view ' WHEN 'S' THEN 'sequence '
                                                        ELSE 'table ' END || c.relname)))
    OR EXISTS (SELECT FROM pg_proc p
                WHERE p.pronamespace = schema.oid AND p.proowner <> schema.owner AND EXISTS (
                      SELECT FROM penstock.schema_object s WHERE s.object = 'function ' || p.oid::regprocedure)) THEN
        RAISE insufficient_privilege;
    END IF;
EXCEPTION
    WHEN insufficient_privilege THEN NULL;
END $$`

// setUpAsOwner is setUp for a session that makes objects of the schema.
func setUpAsOwner(ctx context.Context, c *pgx.Conn) error {
	if err := setUp(ctx, c); err != nil {
		return err
	}
	if _, err := c.Exec(ctx, ownRoleSQL); err != nil {
		return fmt.Errorf("act as the owner of the schema: %w", err)
	}
	return nil
}

// EncodingError says that the database is not one of UTF-8: texts could not be stored, or would be changed silently.
type EncodingError struct{ Database, Encoding string }

func (e *EncodingError) Error() string {
	return fmt.Sprintf("database %q has the encoding %s, and Penstock needs UTF8: create one with "+
		"CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0", e.Database, e.Encoding)
}

// Final says that the error does not pass by itself.
func (e *EncodingError) Final() {}

// checkEncoding returns an *EncodingError where the database is not one of UTF-8.
func checkEncoding(ctx context.Context, c *pgx.Conn) error {
	var e EncodingError
	const sql = `SELECT current_database(), current_setting('server_encoding')`
	if err := c.QueryRow(ctx, sql).Scan(&e.Database, &e.Encoding); err != nil {
		return fmt.Errorf("read the encoding: %w", err)
	}
	if e.Encoding != "UTF8" {
		return &e
	}
	return nil
}
