package migrations_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
)

var updateRights = flag.Bool("update", false, "write "+rightsFile)

const rightsFile = "testdata/rights.txt"

// rightsSQL gives a line for each table, view, sequence and function of the schema and each right on it: with the duties
// that have it, as the server says, and those of PUBLIC. Partitions and counters of single queues come with their
// parents, whose rights they must have.
const rightsSQL = `
WITH object AS (
    SELECT 't' AS kind, c.oid, format('penstock.%I', c.relname) AS name,
           format('penstock.%I', coalesce(top.relname, c.relname)) AS parent
      FROM pg_class c LEFT JOIN pg_class top ON top.oid = pg_partition_root(c.oid)
     WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'p', 'v')
    UNION ALL
    SELECT 's', c.oid, format('penstock.%I', c.relname),
           CASE WHEN c.relname ~ '^(accepted|removed)_' THEN 'penstock.entry_id_seq' ELSE format('penstock.%I', c.relname) END
      FROM pg_class c WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind = 'S'
    UNION ALL
    SELECT 'f', p.oid, p.oid::regprocedure::text, p.oid::regprocedure::text
      FROM pg_proc p WHERE p.pronamespace = 'penstock'::regnamespace AND p.prorettype <> 'trigger'::regtype),
held AS (
    SELECT o.name, r.duty, p.privilege FROM object o
     CROSS JOIN unnest($1::text[], $2::text[]) r(duty, role)
     CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER', 'USAGE', 'EXECUTE']) p(privilege)
     WHERE CASE WHEN o.kind = 't' AND p.privilege NOT IN ('USAGE', 'EXECUTE') THEN has_table_privilege(r.role, o.oid, p.privilege)
                WHEN o.kind = 's' AND p.privilege IN ('SELECT', 'UPDATE', 'USAGE') THEN has_sequence_privilege(r.role, o.oid, p.privilege)
                WHEN o.kind = 'f' AND p.privilege = 'EXECUTE' THEN has_function_privilege(r.role, o.oid, p.privilege) END
    UNION ALL
    SELECT o.name, r.duty, format('%s (%s)', p.privilege, string_agg(a.attname, ', ' ORDER BY a.attname COLLATE "C")) FROM object o
     CROSS JOIN unnest($1::text[], $2::text[]) r(duty, role)
     CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) p(privilege)
      JOIN pg_attribute a ON a.attrelid = o.oid AND a.attnum > 0 AND NOT a.attisdropped
     WHERE o.kind = 't' AND NOT has_table_privilege(r.role, o.oid, p.privilege) AND has_column_privilege(r.role, o.oid, a.attnum, p.privilege)
     GROUP BY o.name, r.duty, p.privilege),
line AS (
    SELECT h.name, h.privilege, string_agg(h.duty, ' ' ORDER BY h.duty) AS duties FROM held h GROUP BY h.name, h.privilege)
SELECT o.name, o.parent, coalesce(string_agg(l.privilege || ': ' || l.duties, E'\n    ' ORDER BY l.privilege COLLATE "C"), 'nobody')
  FROM object o LEFT JOIN line l ON l.name = o.name
 GROUP BY o.name, o.parent ORDER BY o.name COLLATE "C"`

// TestEveryObjectAsEachRole compares the rights of each role on each object with testdata/rights.txt: a new table, view
// or function of the owner needs a decision in functions/rights.sql, which the file then shows.
func TestEveryObjectAsEachRole(t *testing.T) {
	t.Parallel()
	c, roles := granted(t)
	exec(t, c, `SELECT penstock.create_queue('later', '{"capacity": 5}'), penstock.sweep_output(1); SELECT penstock.make_partition(parent, 1) FROM penstock.retention, generate_series(0, 1)`)
	duties, names := []string{"PUBLIC"}, []string{"public"}
	for _, r := range roles {
		duties, names = append(duties, r.Duty), append(names, r.Name)
	}
	matrix := rows(t, c, rightsSQL, duties, names)
	of := map[string]string{}
	for _, line := range matrix {
		of[line[0]] = line[2]
	}
	var text strings.Builder
	for _, line := range matrix {
		object, parent, rights := line[0], line[1], line[2]
		switch {
		case strings.Contains(rights, "PUBLIC"):
			t.Errorf("PUBLIC has rights on %s: %s", object, rights)
		case parent != object && rights != of[parent]:
			t.Errorf("%s has the rights\n    %s\nand %s has\n    %s", object, rights, parent, of[parent])
		case parent == object:
			fmt.Fprintf(&text, "%s\n    %s\n", object, rights)
		}
	}
	if *updateRights {
		if err := os.WriteFile(rightsFile, []byte(text.String()), 0o644); err != nil { //nolint:gosec // part of the source
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(rightsFile)
	if err != nil {
		t.Fatal(err)
	}
	if got := text.String(); got != string(want) {
		t.Errorf("rights differ from %s; decide in functions/rights.sql, then run go test ./migrations -run %s -update\n%s",
			rightsFile, t.Name(), lineDiff(string(want), got))
	}
}

// TestEveryTableIsRefusedOrAllowedAsGranted carries statements out as each role: the server does what its catalog says.
func TestEveryTableIsRefusedOrAllowedAsGranted(t *testing.T) {
	t.Parallel()
	c, roles := granted(t)
	exec(t, c, `CREATE FUNCTION public.state_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
	    EXECUTE statement;
	    RAISE EXCEPTION 'undone' USING ERRCODE = 'XX999';
	EXCEPTION WHEN OTHERS THEN
	    RETURN SQLSTATE;
	END $$`)
	const trySQL = `
SELECT s.statement, CASE WHEN s.may THEN 'XX999' ELSE '42501' END, public.state_of(s.statement) FROM (
    SELECT format(v.statement, c.oid::regclass) AS statement,
           CASE v.privilege WHEN 'SELECT' THEN has_any_column_privilege(c.oid, 'SELECT') ELSE has_table_privilege(c.oid, v.privilege) END AS may
      FROM pg_class c CROSS JOIN (VALUES ('SELECT', 'SELECT FROM %s LIMIT 0'), ('DELETE', 'DELETE FROM %s WHERE false'), ('TRUNCATE', 'TRUNCATE %s CASCADE'))
           v(privilege, statement)
     WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'p')) s`
	for _, role := range roles {
		exec(t, c, `SET ROLE `+role.Name)
		tried := rows(t, c, trySQL)
		exec(t, c, `RESET ROLE`)
		if len(tried) < 120 {
			t.Fatalf("only %d statements were tried as %s", len(tried), role.Duty)
		}
		for _, s := range tried {
			// Rows of the audit are refused by a trigger as well, with the same SQLSTATE.
			if s[1] != s[2] && !strings.Contains(s[0], "penstock.audit") {
				t.Errorf("%s as %s: SQLSTATE %s, want %s", s[0], role.Duty, s[2], s[1])
			}
		}
	}
}

// What each duty is for works, and what would reach beyond it does not.
func TestDutiesReachNoFurther(t *testing.T) {
	t.Parallel()
	c, roles := granted(t)
	named := map[string]string{}
	for _, r := range roles {
		named[r.Duty] = r.Name
	}
	exec(t, c, `SELECT penstock.create_queue('mail')`)
	const refused = "42501"
	for _, attempt := range []struct{ duty, statement, code string }{
		{"push", `SELECT penstock.push('mail', '{}')`, ""},
		{"push", `SELECT penstock.push_json('mail', '[{"payload": {}}]')`, ""},
		{"push", `SELECT penstock.push('webhook', '{"url": "https://victim.example"}')`, "PS002"},
		{"push", `SELECT penstock.push_many('webhook', ARRAY['{}'::jsonb], inside => true)`, refused},
		{"push", `SELECT * FROM penstock.entry`, refused},
		{"push", `SELECT penstock.pause_queue('mail', 'r')`, refused},
		{"read", `SELECT count(*) FROM penstock.queue_status`, ""},
		{"read", `SELECT penstock.explain_entry(1)`, "PS007"}, // there is none
		{"read", `SELECT name FROM penstock.api_token`, ""},
		{"read", `SELECT hash FROM penstock.api_token`, refused},
		{"read", `SELECT secret FROM penstock.webhook_endpoint`, refused},
		{"read", `SELECT penstock.push('mail', '{}')`, refused},
		{"node", `SELECT penstock.register_model('m', '{}', 'r', 'a')`, refused},
		{"node", `UPDATE penstock.instance SET endpoint = 'http://elsewhere'`, refused},
		{"node", `UPDATE penstock.model SET config = '{}'`, refused},
		{"node", `UPDATE penstock.queue SET statements = '{"run": "SELECT 1"}'`, refused},
		{"node", `SELECT FROM penstock.api_token`, refused},
		{"node", `INSERT INTO penstock.webhook_endpoint (url, secret) VALUES ('', 'sealed:x') ON CONFLICT (url) DO NOTHING`, ""},
		{"node", `UPDATE penstock.webhook_endpoint SET secret = 'sealed:y'`, refused},
		{"node", `INSERT INTO penstock.audit (actor, verb, object) VALUES ('a', 'b', 'c')`, refused},
		{"node", `SELECT penstock.audit_log('somebody', 'verb', 'object', 'r')`, refused},
		{"node", `SELECT penstock.set_statements('mail', '{"run": "SELECT 1"}', 'r')`, refused},
		{"operator", `SELECT penstock.pause_queue('mail', 'r')`, ""},
		{"operator", `SELECT penstock.create_queue('more', '{"capacity": 3}')`, ""},
		{"operator", `SELECT penstock.set_statements('mail', '{"run": "SELECT 1"}', 'r')`, ""},
		{"operator", `SELECT penstock.drop_queue('mail', true, 'r')`, ""},
		{"operator", `UPDATE penstock.queue SET paused_at = now()`, refused},
		{"operator", `INSERT INTO penstock.audit (actor, verb, object) VALUES ('a', 'b', 'c')`, refused},
		{"operator", `DELETE FROM penstock.audit`, refused},
		{"operator", `ALTER TABLE penstock.audit DISABLE TRIGGER ALL`, refused},
		{"leader", `SELECT penstock.make_partition('sample', 9), penstock.drop_old_partitions(), penstock.prune_audit('30 days', 10)`, ""},
		{"leader", `UPDATE penstock.remote_run SET report = coalesce(report, '{}'), reported_at = clock_timestamp() WHERE entry_id = 1`, ""},
		{"leader", `UPDATE penstock.remote_run SET token = 1`, refused},
		{"leader", `DELETE FROM penstock.audit`, refused},
		{"leader", `CREATE TABLE penstock.mine (i integer)`, refused},
		{"leader", `CREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text LANGUAGE sql AS 'SELECT 1::text'`, refused},
		{"leader", `SELECT penstock.grant_duty('leader', 'anybody')`, refused},
	} {
		if err := as(t, c, named[attempt.duty], attempt.statement); postgres.Code(err) != attempt.code || (err == nil) != (attempt.code == "") {
			t.Errorf("%s as %s: %v, want SQLSTATE %q", attempt.statement, attempt.duty, err, attempt.code)
		}
	}
}

// A function that runs as the owner has a search path without schemas that others can write to, and the script that is
// printed does what Grant does, twice.
func TestPrintedGrantsDoWhatGrantDoes(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "leader", "node", "gateway", "operator", "push", "read")
	for _, f := range rows(t, c, `SELECT p.oid::regprocedure::text FROM pg_proc p
	      WHERE p.pronamespace = 'penstock'::regnamespace AND p.prosecdef
	        AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)`) {
		t.Errorf("%s runs as the owner with the search path of its caller", f[0])
	}
	for _, f := range rows(t, c, `SELECT name FROM penstock.duty_functions() d
	      WHERE NOT EXISTS (SELECT FROM pg_proc p WHERE p.pronamespace = 'penstock'::regnamespace AND p.proname = d.name AND p.prosecdef)`) {
		t.Errorf("duty_functions lists %s, which does not exist", f[0])
	}
	for _, r := range rows(t, c, `SELECT DISTINCT relation FROM penstock.duty_rights() WHERE to_regclass(format('penstock.%I', relation)) IS NULL`) {
		t.Errorf("duty_rights lists %s, which does not exist", r[0])
	}
	const wrong = `SELECT count(*)::text FROM unnest($1::text[], $2::text[]) u(duty, role)
	                CROSS JOIN LATERAL penstock.duty_differences(u.duty, to_regrole(u.role))`
	duties, names := []string{}, []string{}
	for _, r := range roles {
		duties, names = append(duties, r.Duty), append(names, r.Name)
		exec(t, c, fmt.Sprintf(`REVOKE ALL ON penstock.entry, penstock.queue FROM %[1]s; GRANT TRUNCATE ON penstock.audit TO %[1]s`, r.Name))
	}
	if n := scalar(t, c, wrong, duties, names); n == "0" {
		t.Fatal("rights that were taken by hand are not noticed")
	}
	for range 2 {
		script, err := migrations.GrantSQL(t.Context(), c, roles)
		if err != nil {
			t.Fatal(err)
		}
		exec(t, c, script)
		if n := scalar(t, c, wrong, duties, names); n != "0" {
			t.Errorf("%s rights differ after the script", n)
		}
	}
}

// Rights survive an upgrade, which gives roles what is new.
func TestMigrationGivesRolesRightsOnWhatIsNew(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "leader", "node", "gateway", "operator", "push", "read")
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	file := functions["functions/explain.sql"]
	file.Data = append(file.Data, []byte("\nCREATE FUNCTION penstock.later() RETURNS integer LANGUAGE sql AS 'SELECT 1';\n")...)
	if _, err := migrations.UpWith(t.Context(), c.Config(), functions, migrations.Release); err != nil {
		t.Fatal(err)
	}
	for _, r := range roles {
		want := "true"
		if r.Duty == "push" {
			want = "false"
		}
		if got := scalar(t, c, `SELECT has_function_privilege($1, 'penstock.later()', 'EXECUTE')::text`, r.Name); got != want {
			t.Errorf("%s may call a new function: %s", r.Duty, got)
		}
	}
	if got := scalar(t, c, `SELECT has_function_privilege('public', 'penstock.later()', 'EXECUTE')::text`); got != "false" {
		t.Error("PUBLIC may call a new function")
	}
}

// A transaction that changes rights may be open for longer than a statement waits for it: the grant is tried again.
func TestGrantIsTriedAgainAfterAWaitForRights(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "push")
	holder := connect(t, c.Config().ConnString())
	exec(t, holder, `BEGIN; SELECT penstock.hold_rights()`)
	granting := make(chan error, 1)
	go func() {
		_, err := migrations.Grant(t.Context(), c.Config(), roles)
		granting <- err
	}()
	const waiting = `SELECT count(*)::text FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`
	late := time.After(time.Minute)
	for _, want := range []string{"1", "0"} { // it waits, and has given up
		for scalar(t, c, waiting, holder.PgConn().PID()) != want {
			select {
			case err := <-granting:
				t.Fatalf("the grant ended while another transaction held the rights: %v", err)
			case <-late:
				t.Fatalf("%s transactions wait for the rights after a minute, want %s",
					scalar(t, c, waiting, holder.PgConn().PID()), want)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	exec(t, holder, `ROLLBACK`)
	if err := <-granting; err != nil {
		t.Error(err)
	}
}

func TestPasswordIsStoredAsAVerifier(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "push")
	roles[0].Password = "hunter2, of course"
	script, err := migrations.GrantSQL(t.Context(), c, roles[:1])
	if err != nil || strings.Contains(script, "hunter2") || !strings.Contains(script, "SCRAM-SHA-256$4096:") {
		t.Errorf("script %.300s, %v", script, err)
	}
	if _, err := migrations.Grant(t.Context(), c.Config(), roles[:1]); err != nil {
		t.Fatal(err)
	}
	if got := scalar(t, c, `SELECT rolcanlogin::text FROM pg_roles WHERE rolname = $1`, roles[0].Name); got != "true" {
		t.Error("the role cannot log in")
	}
	roles[0].Password = "pässword"
	if _, err := migrations.GrantSQL(t.Context(), c, roles[:1]); err == nil {
		t.Error("a password was taken that Postgres would normalize")
	}
}

// Roles belong to the server: a second installation on it would change the passwords of the first one.
func TestAPasswordOfAnotherInstallationIsNotReplaced(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "push")
	name := roles[0].Name
	exec(t, c, `DELETE FROM penstock.database_role; ALTER ROLE `+name+` LOGIN PASSWORD 'theirs'`)
	stored := func() string { return scalar(t, c, `SELECT rolpassword FROM pg_authid WHERE rolname = $1`, name) }
	theirs := stored()
	roles[0].Password = "ours"
	var taken *migrations.TakenError
	if _, err := migrations.Grant(t.Context(), c.Config(), roles); !errors.As(err, &taken) || taken.Role != name {
		t.Errorf("granting to a role of others: %v", err)
	}
	if _, err := migrations.GrantSQL(t.Context(), c, roles); !errors.As(err, &taken) {
		t.Errorf("the script for a role of others: %v", err)
	}
	if stored() != theirs {
		t.Error("the password of others was replaced")
	}
	roles[0].ReplacePassword = true
	for range 2 { // the second time it has a duty here
		if _, err := migrations.Grant(t.Context(), c.Config(), roles); err != nil || stored() == theirs {
			t.Errorf("the password was not replaced: %v", err)
		}
		roles[0].ReplacePassword, theirs = false, stored()
	}
}

// From Postgres 16 on an owner without ADMIN on pg_read_all_stats cannot give it to the roles that diagnose. The notice
// says who can.
func TestGrantTellsWhatTheOwnerMayNotGive(t *testing.T) {
	t.Parallel()
	_, c, asOwner := ownedByAnother(t)
	exec(t, c, `ALTER ROLE `+pgx.Identifier{asOwner.RuntimeParams["role"]}.Sanitize()+` CREATEROLE`)
	if _, err := migrations.Up(t.Context(), asOwner); err != nil {
		t.Fatal(err)
	}
	name := "test_" + scalar(t, c, `SELECT substr(md5(random()::text), 1, 10)`)
	t.Cleanup(func() {
		if err := execAfter(c.Config().ConnString(), fmt.Sprintf(`DROP OWNED BY %[1]s; DROP ROLE %[1]s`, name)); err != nil {
			t.Error(err)
		}
	})
	done, err := migrations.Grant(t.Context(), asOwner, []migrations.Role{{Name: name, Duty: "leader"}})
	if err != nil {
		t.Fatal(err)
	}
	member := scalar(t, c, `SELECT pg_has_role($1, 'pg_read_all_stats', 'MEMBER')::text`, name) == "true"
	const says = "a superuser should run: GRANT pg_read_all_stats TO "
	if told := strings.Contains(strings.Join(done.Notes, "\n"), says); told == member {
		t.Errorf("the leader is a member: %v, and the notes are %q", member, done.Notes)
	}
}

// With quote_all_identifiers, names that the server prints differ from those that functions write.
func TestRightsAreNotGivenAgainWhereNamesAreQuoted(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "read")
	exec(t, c, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET quote_all_identifiers = on', current_database()); END $$`)
	if done, err := migrations.Grant(t.Context(), c.Config(), roles); err != nil || done.Changed != 0 {
		t.Errorf("%d rights changed: %v", done.Changed, err)
	}
}

// Roles of a dump belong to the superuser who restored it: from Postgres 16 on an owner with CREATEROLE may not change
// them either.
func TestAnOwnerThatMayNotChangeARoleIsToldSo(t *testing.T) {
	t.Parallel()
	_, c, asOwner := ownedByAnother(t)
	if _, err := migrations.Up(t.Context(), asOwner); err != nil {
		t.Fatal(err)
	}
	name := "test_" + scalar(t, c, `SELECT substr(md5(random()::text), 1, 10)`)
	exec(t, c, `CREATE ROLE `+name)
	t.Cleanup(func() { _, _ = c.Exec(context.Background(), `DROP ROLE `+name) })
	var admin *migrations.AdminError
	_, err := migrations.Grant(t.Context(), asOwner, []migrations.Role{{Name: name, Duty: "push", Password: "x"}})
	if !errors.As(err, &admin) {
		t.Errorf("the owner gave a password to a role of others: %v", err)
	}
}

// The table of migrations is in schema public, which an administrator may have taken from PUBLIC.
func TestProgramsReadWhatWasAppliedWherePublicIsClosed(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "leader", "push")
	uses := func(role string) string {
		return scalar(t, c, `SELECT has_schema_privilege($1, 'public', 'USAGE')::text`, role)
	}
	exec(t, c, `REVOKE ALL ON SCHEMA public FROM PUBLIC`)
	if _, err := migrations.Grant(t.Context(), c.Config(), roles); err != nil {
		t.Fatal(err)
	}
	for _, r := range roles {
		if r.Duty == "push" && uses(r.Name) == "true" {
			t.Error("a producer may use schema public")
		}
		const wrong = `SELECT count(*)::text FROM penstock.duty_differences($1, to_regrole($2))`
		if n := scalar(t, c, wrong, r.Duty, r.Name); n != "0" {
			t.Errorf("%s: %s rights differ", r.Duty, n)
		}
		if r.Duty == "leader" {
			exec(t, c, `SET ROLE `+r.Name)
			if err := migrations.Check(t.Context(), c); err != nil {
				t.Errorf("a leader does not start: %v", err)
			}
			exec(t, c, `RESET ROLE`)
		}
		// A right that somebody gave for tables of an application is left alone.
		exec(t, c, `GRANT USAGE ON SCHEMA public TO `+r.Name)
	}
	if _, err := migrations.Grant(t.Context(), c.Config(), roles); err != nil {
		t.Fatal(err)
	}
	for _, r := range roles {
		if uses(r.Name) == "false" {
			t.Errorf("the right of %s to use schema public was taken", r.Duty)
		}
	}
}

// granted returns a connection to a migrated database, and a role of its own for each duty, or for all.
func granted(t *testing.T, duties ...string) (*pgx.Conn, []migrations.Role) {
	t.Helper()
	admin := connect(t, pgtest.DSN(t)) // its database outlives the roles' last grants
	var suffix string
	if err := admin.QueryRow(t.Context(), `SELECT substr(md5(random()::text), 1, 10)`).Scan(&suffix); err != nil {
		t.Fatal(err)
	}
	roles := slices.DeleteFunc(migrations.Roles("test_"+suffix), func(r migrations.Role) bool {
		return len(duties) > 0 && !slices.Contains(duties, r.Duty)
	})
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, r := range roles {
			if _, err := admin.Exec(ctx, fmt.Sprintf(`DROP OWNED BY %[1]s; DROP ROLE %[1]s`, r.Name)); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := migrations.Grant(t.Context(), admin.Config(), roles); err != nil {
		t.Fatal(err)
	}
	return admin, roles
}

// as runs a statement as a role, in a transaction that is undone.
func as(t *testing.T, c *pgx.Conn, role, statement string) error {
	t.Helper()
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE `+pgx.Identifier{role}.Sanitize()); err != nil {
		t.Fatal(err)
	}
	_, err = tx.Exec(t.Context(), statement)
	return err
}

func rows(t *testing.T, c *pgx.Conn, sql string, args ...any) [][]string {
	t.Helper()
	found, _ := c.Query(t.Context(), sql, args...)
	all, err := pgx.CollectRows(found, func(row pgx.CollectableRow) ([]string, error) {
		values, err := row.Values()
		texts := make([]string, len(values))
		for i, v := range values {
			texts[i] = fmt.Sprint(v)
		}
		return texts, err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func scalar(t *testing.T, c *pgx.Conn, sql string, args ...any) (value string) {
	t.Helper()
	if err := c.QueryRow(t.Context(), sql, args...).Scan(&value); err != nil {
		t.Fatalf("%s %v: %v", sql, args, err)
	}
	return value
}

// lineDiff lists the lines that only one of two texts has.
func lineDiff(want, got string) string {
	var out strings.Builder
	ours, theirs := strings.Split(want, "\n"), strings.Split(got, "\n")
	for _, l := range ours {
		if !slices.Contains(theirs, l) {
			fmt.Fprintln(&out, "-", l)
		}
	}
	for _, l := range theirs {
		if !slices.Contains(ours, l) {
			fmt.Fprintln(&out, "+", l)
		}
	}
	return out.String()
}
