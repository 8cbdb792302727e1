package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func exec(t *testing.T, c *pgx.Conn, sql string) {
	t.Helper()
	if _, err := c.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](t *testing.T, c *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	rows, _ := c.Query(t.Context(), sql, args...)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func config(t *testing.T, dsn string) *pgx.ConnConfig {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func up(t *testing.T, dsn string) int {
	t.Helper()
	done, err := migrations.Up(t.Context(), config(t, dsn))
	if err != nil {
		t.Fatal(err)
	}
	return done.Applied
}

// upWith applies the functions of another program.
func upWith(t *testing.T, dsn string, functions fstest.MapFS, release int) int {
	t.Helper()
	done, err := migrations.UpWith(t.Context(), config(t, dsn), functions, release)
	if err != nil {
		t.Fatal(err)
	}
	return done.Applied
}

// changed returns the functions with one text replaced in a file.
func changed(t *testing.T, file, old, replacement string) fstest.MapFS {
	t.Helper()
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	name := "functions/" + file
	text := string(functions[name].Data)
	if strings.Count(text, old) != 1 {
		t.Fatalf("%s has %q %d times", name, old, strings.Count(text, old))
	}
	functions[name] = &fstest.MapFile{Data: []byte(strings.Replace(text, old, replacement, 1))}
	return functions
}

// otherAgo is a program whose function ago answers something else.
func otherAgo(t *testing.T, answer string) fstest.MapFS {
	t.Helper()
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	const name = "functions/explain.sql"
	added := fmt.Sprintf("\nCREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '%s' $$;\n", answer)
	functions[name] = &fstest.MapFile{Data: append(slices.Clone(functions[name].Data), added...)}
	return functions
}

func mustCatalog(t *testing.T, c *pgx.Conn) map[string]string {
	t.Helper()
	found, err := migrations.Catalog(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 500 {
		t.Fatalf("the catalog has %d objects", len(found))
	}
	return found
}

func TestADatabaseFromNothingEqualsOneThatWasMigratedAndReapplied(t *testing.T) {
	fresh, older := pgtest.Empty(t), pgtest.Empty(t)
	upWith(t, older, changed(t, "views.sql", "CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT l.queue,",
		"CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT 1 AS first, l.queue,"), migrations.Release)
	upWith(t, older, otherAgo(t, "never"), migrations.Release)
	up(t, older)
	up(t, fresh)
	want, got := mustCatalog(t, connect(t, fresh)), mustCatalog(t, connect(t, older))
	for object, definition := range want {
		if got[object] != definition {
			t.Errorf("%s is %q, from nothing %q", object, got[object], definition)
		}
	}
	for object := range got {
		if _, known := want[object]; !known {
			t.Errorf("%s is not made from nothing", object)
		}
	}
}

func TestChangedFunctionsAreAppliedAndReplacedOnesNeverAgain(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	ago := func() string { return query[string](t, c, `SELECT penstock.ago('1 hour')`) }
	before := ago()
	if n := up(t, dsn); n != 0 {
		t.Errorf("the same functions were applied again: %d", n)
	}
	newer := otherAgo(t, "never")
	if n := upWith(t, dsn, newer, migrations.Release); n != 1 || ago() != "never" {
		t.Fatalf("applied %d, and ago says %q", n, ago())
	}
	if n := up(t, dsn); n != 0 || ago() != "never" {
		t.Errorf("a program of before took its functions back: applied %d, ago says %q, before %q", n, ago(), before)
	}
	if err := migrations.Check(t.Context(), c); err != nil {
		t.Errorf("a program of before does not start on the newer functions: %v", err)
	}
}

// Programs that were rolled back to the release before, with a mended set, must not keep the newer release from having
// its own functions when it is deployed again.
func TestTheNewestReleaseHasItsFunctionsAfterARollback(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	ago := func() string { return query[string](t, c, `SELECT penstock.ago('1 hour')`) }
	older, newer := otherAgo(t, "mended"), otherAgo(t, "newer")
	upWith(t, dsn, newer, migrations.Release+1)
	done, err := migrations.UpWith(t.Context(), config(t, dsn), older, migrations.Release)
	if err != nil || done.Applied != 0 || len(done.Notes) != 1 || !strings.Contains(done.Notes[0], "release 2") {
		t.Errorf("a set of the release before: %+v (%v)", done, err)
	}
	if err := migrations.Check(t.Context(), c); err != nil {
		t.Errorf("a program of the release before does not start: %v", err)
	}
	if n := upWith(t, dsn, newer, migrations.Release+1); n != 0 || ago() != "newer" {
		t.Errorf("deployed again: applied %d, ago is %q", n, ago())
	}
	text, err := migrations.SQL(migrations.FunctionsName)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, c, text) // by hand, or by programs that look at their own set only
	if ago() == "newer" {
		t.Fatal("the older set was not applied: the test shows nothing")
	}
	if n := upWith(t, dsn, newer, migrations.Release+1); n != 1 || ago() != "newer" {
		t.Errorf("deployed again after an older set: applied %d, ago is %q", n, ago())
	}
}

func TestAProgramWhoseFunctionsWereNeverAppliedDoesNotStart(t *testing.T) {
	dsn := pgtest.Empty(t)
	upWith(t, dsn, otherAgo(t, "never"), migrations.Release)
	err := migrations.Check(t.Context(), connect(t, dsn))
	if err == nil || !strings.Contains(err.Error(), "functions") {
		t.Errorf("got %v", err)
	}
	up(t, dsn)
	if err := migrations.Check(t.Context(), connect(t, dsn)); err != nil {
		t.Error(err)
	}
}

// Nodes and gateways start with a role that may not read what was applied, and not on a schema that is too old.
func TestAProgramThatMayNotReadWhatWasAppliedStarts(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `DELETE FROM penstock.schema_version`)
	if err := migrations.CheckIfReadable(t.Context(), c); err == nil {
		t.Error("a schema without applied migrations is not refused")
	}
	exec(t, c, `SET ROLE pg_monitor`) // of Postgres, without rights here
	if err := migrations.CheckIfReadable(t.Context(), c); err != nil {
		t.Errorf("a role without the right to read what was applied: %v", err)
	}
	if err := migrations.Check(t.Context(), c); err == nil {
		t.Error("the role may read what was applied: the test shows nothing")
	}
}

// What an administrator, or the pool of a leader, sets for sessions does not bound or change migrations.
func TestSettingsOfSessionsDoNotReachMigrations(t *testing.T) {
	dsn := pgtest.Empty(t)
	c := connect(t, dsn)
	exec(t, c, `CREATE SCHEMA compatible`)
	exec(t, c, `CREATE FUNCTION compatible.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
		RAISE 'a function of the search path was called by %', current_user; END $$`)
	for _, setting := range []string{
		"statement_timeout = 2000", "idle_session_timeout = 2000", "idle_in_transaction_session_timeout = 2000",
		"standard_conforming_strings = off", "backslash_quote = off", "client_encoding = LATIN1", "DateStyle = ''SQL, DMY''",
		"TimeZone = ''Asia/Kolkata''", "IntervalStyle = sql_standard", "default_transaction_isolation = ''repeatable read''",
		"search_path = compatible, pg_catalog", // as extensions ask for that bring the functions of another database
	} {
		exec(t, c, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET `+setting+`', current_database()); END $$`)
	}
	cfg := config(t, dsn)
	cfg.RuntimeParams["statement_timeout"] = "2000" // the statement that lifts it has to be answered by then
	slow := otherAgo(t, "a moment")
	slow["functions/slow.sql"] = &fstest.MapFile{Data: []byte(`DO $$ BEGIN PERFORM pg_sleep(2.5); END $$;`)}
	if _, err := migrations.UpWith(t.Context(), cfg, slow, migrations.Release); err != nil {
		t.Error(err)
	}
}

func TestADatabaseOfAnotherEncodingIsRefused(t *testing.T) {
	dsn := pgtest.Empty(t)
	c := connect(t, dsn)
	name := query[string](t, c, `SELECT current_database()::text`) + "_latin1"
	exec(t, c, `CREATE DATABASE `+name+` ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0`)
	t.Cleanup(func() {
		if err := execAfter(dsn, `DROP DATABASE `+name+` WITH (FORCE)`); err != nil {
			t.Error(err)
		}
	})
	cfg := config(t, dsn)
	cfg.Database = name
	_, err := migrations.Up(t.Context(), cfg)
	var refused *migrations.EncodingError
	if !errors.As(err, &refused) || refused.Encoding != "LATIN1" {
		t.Errorf("got %v", err)
	}
}

// execAfter runs a statement after the test's context has ended.
func execAfter(dsn, sql string) error {
	c, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		return err
	}
	defer c.Close(context.Background())
	_, err = c.Exec(context.Background(), sql)
	return err
}

func TestTwoThatMigrateAtOnceApplyOnce(t *testing.T) {
	dsn := pgtest.Empty(t)
	type answer struct {
		n   int
		err error
	}
	const programs = 4
	answers := make(chan answer, programs)
	for range programs {
		cfg := config(t, dsn)
		go func() {
			done, err := migrations.Up(context.WithoutCancel(t.Context()), cfg)
			answers <- answer{done.Applied, err}
		}()
	}
	sum := 0
	for range programs {
		a := <-answers
		if a.err != nil {
			t.Error(a.err)
		}
		sum += a.n
	}
	if known, err := migrations.Names(); err != nil || sum != len(known)+1 {
		t.Errorf("applied %d in sum, want %d (%v)", sum, len(known)+1, err)
	}
	if n := query[int](t, connect(t, dsn), `SELECT count(*)::int FROM penstock.schema_version`); n != 1 {
		t.Errorf("functions were applied %d times", n)
	}
}

func TestAFunctionStaysForOneReleaseAfterItHasLeftTheFiles(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	added := func(text string) fstest.MapFS { return withFile(t, text) }
	exec(t, c, `CREATE FUNCTION penstock.of_somebody_else() RETURNS int LANGUAGE sql AS 'SELECT 1'`)
	there := func(name string) bool {
		return query[bool](t, c, `SELECT EXISTS (SELECT FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace AND proname = $1)`, name)
	}
	const release = migrations.Release
	upWith(t, dsn, added(`CREATE OR REPLACE FUNCTION penstock.leaving() RETURNS int LANGUAGE sql AS 'SELECT 1';`), release)
	upWith(t, dsn, added(`-- release 2`), release+1)
	if !there("leaving") {
		t.Error("programs of the release before cannot call it any more")
	}
	upWith(t, dsn, added(`-- release 2, mended`), release+1)
	if !there("leaving") {
		t.Error("dropped by a second set of the release that left it out")
	}
	upWith(t, dsn, added(`-- release 3`), release+2)
	if there("leaving") {
		t.Error("no program calls it any more, and it is still there")
	}
	if !there("of_somebody_else") {
		t.Error("a function that no file ever had was dropped")
	}
}

// The rights of functions are set behind the views, so that a function may be written more than once.
func TestViewsMayChangeInEachRelease(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	const head = "CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT "
	for i, columns := range []string{"/* the same columns */ ", "1 AS first, ", "2 AS first, ", "3 AS second, 3 AS first, "} {
		release := migrations.Release + 1 + i
		upWith(t, dsn, changed(t, "views.sql", head+"l.queue,", head+columns+"l.queue,"), release)
		old := query[string](t, c, `SELECT coalesce(string_agg(object, ', '), '') FROM penstock.schema_object
			 WHERE object LIKE 'function %' AND release <> $1`, release)
		if old != "" {
			t.Errorf("not recorded as written by release %d: %s", release, old)
		}
	}
}

func TestViewsWhoseColumnsChangeKeepTheirGrants(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	role := fmt.Sprintf("reader_%d", time.Now().UnixNano())
	exec(t, c, `CREATE ROLE `+role)
	t.Cleanup(func() {
		if err := execAfter(dsn, `DROP OWNED BY `+role+`; DROP ROLE `+role); err != nil {
			t.Error(err)
		}
	})
	exec(t, c, `GRANT SELECT ON penstock.stuck, penstock.queue_status TO `+role+`; GRANT SELECT ON penstock.node_status TO PUBLIC`)
	upWith(t, dsn, changed(t, "views.sql", "CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT l.queue,",
		"CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT 1 AS first, l.queue,"), migrations.Release)
	if first := query[string](t, c, `SELECT attname::text FROM pg_attribute WHERE attrelid = 'penstock.stuck'::regclass AND attnum = 1`); first != "first" {
		t.Errorf("the first column is %s", first)
	}
	for _, view := range []string{"stuck", "queue_status", "node_status"} {
		if !query[bool](t, c, `SELECT has_table_privilege($1, 'penstock.' || $2, 'SELECT')`, role, view) {
			t.Errorf("the right to read %s is gone", view)
		}
	}
	if query[bool](t, c, `SELECT has_table_privilege($1, 'penstock.entry_status', 'SELECT')`, role) {
		t.Error("a right was given that nobody had")
	}
}

// Views that somebody made in the schema, or built on those of the schema, are not dropped, nor are those of other files.
// After an upgrade of Postgres the record is made anew, without what was made by hand.
func TestViewsThatWereMadeByHandStay(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	exec(t, c, `
CREATE VIEW penstock.my_queues AS SELECT name FROM penstock.queue;
CREATE FUNCTION penstock.my_function() RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE VIEW public.my_stuck AS SELECT queue FROM penstock.stuck`)
	another := func(column string) fstest.MapFS {
		return changed(t, "views.sql", "CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT l.queue,",
			"CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT 1 AS "+column+", l.queue,")
	}
	_, err := migrations.UpWith(t.Context(), config(t, dsn), another("first"), migrations.Release)
	if err == nil || !strings.Contains(err.Error(), "my_stuck") {
		t.Errorf("error is %v, want one that names the view", err)
	}
	exec(t, c, `DROP VIEW public.my_stuck`)
	stay := func() {
		t.Helper()
		for _, view := range []string{"my_queues", "scale_input", "scale_wanted", "scale_share"} {
			if query[*string](t, c, `SELECT to_regclass('penstock.' || $1)::text`, view) == nil {
				t.Errorf("the view %s is gone", view)
			}
		}
	}
	upWith(t, dsn, another("first"), migrations.Release)
	stay()

	exec(t, c, `UPDATE penstock.schema_version SET server_major = server_major - 1`)
	upWith(t, dsn, another("first"), migrations.Release)
	recorded := query[string](t, c, `SELECT coalesce(string_agg(object, ', '), '') FROM penstock.schema_object WHERE object ~ 'my_'`)
	if recorded != "" {
		t.Errorf("recorded after an upgrade of Postgres: %s", recorded)
	}
	upWith(t, dsn, another("second"), migrations.Release)
	stay()
}

func TestAFileThatCannotBeAppliedIsNamedAndChangesNothing(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	before := mustCatalog(t, c)
	broken := otherAgo(t, "never")
	broken["functions/zoo.sql"] = &fstest.MapFile{Data: []byte("-- a comment\n\nCREATE OR REPLACE FUNCTIO penstock.x();\n")}
	_, err := migrations.UpWith(t.Context(), config(t, dsn), broken, migrations.Release)
	if err == nil || !strings.Contains(err.Error(), "functions/zoo.sql") || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("error is %v", err)
	}
	if after := mustCatalog(t, c); !maps.Equal(before, after) {
		t.Error("the schema has changed")
	}
}

// undoLast takes back the migrations from 13 on, and the record of what they made. The views that read a column are made again
// with the functions, those of views.sql because no hash of it is recorded.
const undoLast = `
ALTER TABLE penstock.cancel_request DROP COLUMN lock_key;
ALTER TABLE penstock.node DROP COLUMN running_entries;
ALTER TABLE penstock.usage_hour DROP COLUMN extra_ms CASCADE, DROP COLUMN application CASCADE;
ALTER TABLE penstock.remote_run DROP COLUMN reported_at;
ALTER TABLE penstock.instance DROP COLUMN began_at CASCADE, DROP COLUMN time_to_live CASCADE, DROP COLUMN backend_began_at CASCADE;
ALTER TABLE penstock.gateway_batch DROP COLUMN idle_turns;
ALTER TABLE penstock.deployment_state DROP COLUMN error_kind CASCADE;
ALTER TABLE penstock.operation DROP COLUMN partial CASCADE;
ALTER TABLE penstock.batch DROP COLUMN parts CASCADE, DROP COLUMN bad_parts CASCADE;
ALTER TABLE penstock.gateway_token ALTER COLUMN criticality SET NOT NULL, ALTER COLUMN criticality SET DEFAULT 'critical';
COMMENT ON COLUMN penstock.gateway_token.criticality IS NULL;
CREATE INDEX idempotency_created_at ON penstock.idempotency USING brin (created_at);
DELETE FROM penstock.schema_object WHERE object IN ('column cancel_request.lock_key', 'column node.running_entries', 'column usage_hour.extra_ms',
                                                    'column instance.began_at', 'column instance.time_to_live', 'column instance.backend_began_at', 'column gateway_batch.idle_turns',
                                                    'column deployment_state.error_kind', 'column usage_hour.application',
                                                    'column remote_run.reported_at', 'index audit_object', 'index audit_actor',
                                                    'column operation.partial', 'column batch.parts', 'column batch.bad_parts');
UPDATE penstock.schema_version SET files = files - 'views.sql';`

// A new trigger on the audit waits for transactions that read or write it.
func TestMigrationLetsOthersPassWhileATableIsHeld(t *testing.T) {
	dsn := pgtest.DSN(t)
	holder, other := connect(t, dsn), connect(t, dsn)
	exec(t, other, `DROP INDEX penstock.audit_object, penstock.audit_actor`) // of undoLast, which the lock would hold up
	exec(t, holder, `BEGIN; LOCK TABLE penstock.audit IN ROW EXCLUSIVE MODE`)
	newer := changed(t, "triggers.sql", "BEFORE UPDATE OR TRUNCATE ON penstock.audit", "BEFORE TRUNCATE OR UPDATE ON penstock.audit")
	cfg := config(t, dsn)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { _, err := migrations.UpWith(ctx, cfg, newer, migrations.Release); done <- err }()
	await(t, other, "audit")
	// It is let in when the first try is over, though the table is held until long after the last one.
	exec(t, other, `SET statement_timeout = '1min'`)
	exec(t, other, `INSERT INTO penstock.audit (actor, verb, object) VALUES ('ada', 'look', 'audit')`)
	cancel()
	err := <-done
	for _, part := range []string{"triggers.sql", "penstock.audit", fmt.Sprintf("pg_terminate_backend(%d)", holder.PgConn().PID())} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not name %s", err, part)
		}
	}

	// What the first try migrates is not taken by the second one for a change by hand.
	exec(t, other, undoLast)
	undone := query[int](t, other, `WITH undone AS (DELETE FROM `+migrations.Table+` WHERE version_id >= 13 RETURNING 1) SELECT count(*) FROM undone`)
	go func() {
		applied, err := migrations.UpWith(t.Context(), cfg, newer, migrations.Release)
		if err == nil && applied.Applied != undone+1 { // and the functions
			err = fmt.Errorf("applied %d", applied.Applied)
		}
		done <- err
	}()
	await(t, other, "audit")
	exec(t, other, `INSERT INTO penstock.audit (actor, verb, object) VALUES ('ada', 'look', 'audit')`)
	exec(t, holder, `COMMIT`)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if drift, err := migrations.Drift(t.Context(), other); err != nil || len(drift.Objects)+len(drift.Parameters) > 0 {
		t.Errorf("the schema differs from its record: %v (%v)", drift, err)
	}
}

// An index of a large table is not built again for a table after it that is held: whatever waits for it is let in, and an
// operation, which writes to both, is no deadlock with it.
func TestAnIndexIsBuiltApartFromColumnsThatWaitForTheirTable(t *testing.T) {
	dsn := pgtest.DSN(t)
	holder, other := connect(t, dsn), connect(t, dsn)
	exec(t, other, `DROP INDEX penstock.audit_object, penstock.audit_actor`) // of undoLast
	exec(t, other, undoLast)
	exec(t, other, `DELETE FROM `+migrations.Table+` WHERE version_id >= 13`)
	exec(t, holder, `BEGIN; LOCK TABLE penstock.operation IN ROW EXCLUSIVE MODE`)
	done := make(chan error, 1)
	go func() { _, err := migrations.Up(t.Context(), config(t, dsn)); done <- err }()
	await(t, other, "operation")
	if query[int](t, other, `SELECT count(*)::int FROM pg_class WHERE oid = to_regclass('penstock.audit_actor')`) == 0 {
		t.Error("the index of the audit is not there while a column of operation waits")
	}
	exec(t, holder, `INSERT INTO penstock.audit (actor, verb, object) VALUES ('ada', 'begin', 'operation'); COMMIT`)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// await returns when a session waits for a table.
func await(t *testing.T, c *pgx.Conn, table string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if query[int](t, c, `SELECT count(*)::int FROM pg_locks l JOIN pg_database d ON d.oid = l.database
		                      WHERE NOT granted AND relation = 'penstock.`+table+`'::regclass AND datname = current_database()`) > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody waits for ", table)
		}
	}
}
