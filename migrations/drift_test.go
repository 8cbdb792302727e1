package migrations_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

func TestDriftIsNothingAfterTheMigrationsAndNamesEachChange(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	drift := func() []string {
		t.Helper()
		found, err := migrations.Drift(t.Context(), c)
		if err != nil || len(found.Parameters) > 0 {
			t.Fatal(found.Parameters, err)
		}
		return found.Objects
	}
	exec(t, c, `SELECT penstock.create_queue('work', '{"capacity": 10}'), penstock.create_queue('changes', '{"kind": "change_log"}'), penstock.make_partition('sample', 3);
	            CREATE TABLE watched (id int PRIMARY KEY); SELECT penstock.watch('watched', 'changes');
	            CREATE INDEX of_an_operator ON penstock.audit (actor); GRANT SELECT ON penstock.entry TO PUBLIC`)
	exec(t, c, `CLUSTER penstock.lock USING lock_pkey; REINDEX TABLE penstock.lock`)
	if lines := drift(); len(lines) > 0 {
		t.Fatalf("what queues, days, watches and operators make is taken for drift: %q", lines)
	}
	exec(t, c, `CREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'never' $$;
	            CREATE FUNCTION penstock.mine() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
	            DROP VIEW penstock.stuck;
	            DROP INDEX penstock.ready_lock_key;
	            DROP FUNCTION penstock.merge_payloads;
	            ALTER TABLE penstock.queue DROP COLUMN paused_reason CASCADE;
	            ALTER TABLE penstock.audit ALTER COLUMN actor DROP NOT NULL;
	            ALTER TABLE penstock.entry DETACH PARTITION penstock.entry_work`)
	want := []string{
		"column audit.actor was changed", "column queue.paused_reason is missing", "function penstock.ago(interval) was changed",
		"function penstock.merge_payloads(text,jsonb[]) is missing", "function penstock.mine() is not of any migration",
		"index ready_lock_key is missing", "view queue_status is missing", "view stuck is missing", "queue work has no table entry_work",
	}
	lines := drift()
	for _, line := range want {
		if !slices.Contains(lines, line) {
			t.Errorf("not named: %s", line)
		}
	}
	if len(lines) < len(want) || t.Failed() {
		t.Errorf("drift is\n%s", strings.Join(lines, "\n"))
	}
}

// An administrator who tunes a table has not broken it.
func TestParametersOfStorageAreNamedApartFromOtherChanges(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `ALTER TABLE penstock.lock SET (fillfactor = 91, autovacuum_vacuum_threshold = 500);
	            ALTER TABLE penstock.ready RESET (autovacuum_vacuum_cost_delay);
	            ALTER INDEX penstock.ready_lock_key SET (fillfactor = 60);
	            ALTER TABLE penstock.queue ALTER COLUMN name SET STATISTICS 500, ALTER COLUMN name SET (n_distinct = 9);
	            ALTER TABLE penstock.setting SET (autovacuum_enabled = off, fillfactor = 90);
	            ALTER TABLE penstock.model SET (fillfactor = 90);
	            COMMENT ON TABLE penstock.model IS 'mine';
	            ALTER TABLE penstock.usage SET (fillfactor = 70); ALTER TABLE penstock.usage SET (fillfactor = 50)`)
	drift, err := migrations.Drift(t.Context(), c)
	want := migrations.Differences{
		Objects: []string{"table model was changed", "table setting was changed"},
		Parameters: []string{
			"column queue.name: n_distinct is 9, Penstock's is not set", "column queue.name: statistics is 500, Penstock's is not set",
			"index ready_lock_key: fillfactor is 60, Penstock's is not set",
			"table lock: autovacuum_vacuum_threshold is 500, Penstock's is not set", "table lock: fillfactor is 91, Penstock's is not set",
			"table ready: autovacuum_vacuum_cost_delay is not set, Penstock's is 0",
		},
	}
	if err != nil || !slices.Equal(drift.Objects, want.Objects) || !slices.Equal(drift.Parameters, want.Parameters) {
		t.Errorf("%v: %q, want %q", err, drift, want)
	}
}

// A change by hand must not become the record when functions are applied the next time.
func TestDriftIsNotForgottenWhenFunctionsAreApplied(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	exec(t, c, `DROP INDEX penstock.ready_lock_key; ALTER TABLE penstock.audit ADD COLUMN more text;
	            CREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'by hand' $$`)
	upWith(t, dsn, otherAgo(t, "by a file"), migrations.Release)
	drift, err := migrations.Drift(t.Context(), c)
	lines := drift.Objects
	want := []string{"column audit.more is not of any migration", "index ready_lock_key is missing"}
	if err != nil || !slices.Equal(lines, want) {
		t.Errorf("drift is %q, want %q (%v)", lines, want, err)
	}
}

// What an administrator sets for sessions must not look like a change of the schema.
func TestDriftDoesNotDependOnSettings(t *testing.T) {
	dsn := pgtest.DSN(t)
	for _, setting := range []string{
		"IntervalStyle = iso_8601", "DateStyle = 'SQL, DMY'", "TimeZone = 'Asia/Kolkata'", "quote_all_identifiers = on",
		"bytea_output = escape", "extra_float_digits = -5", "standard_conforming_strings = off", "search_path = penstock",
	} {
		exec(t, connect(t, dsn), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET `+strings.ReplaceAll(setting, "'", "''")+`', current_database()); END $$`)
	}
	if lines, err := migrations.Drift(t.Context(), connect(t, dsn)); err != nil || len(lines.Objects)+len(lines.Parameters) > 0 {
		t.Errorf("drift is %d objects, as %q, and %q (%v)", len(lines.Objects), lines.Objects[:min(3, len(lines.Objects))], lines.Parameters, err)
	}
}

// Another major version prints views and constraints otherwise: after an upgrade there is nothing to compare with.
func TestASchemaThatAnotherMajorVersionRecordedIsRecordedAnew(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	for _, before := range []string{"server_major - 1", "NULL"} {
		exec(t, c, `UPDATE penstock.schema_version SET server_major = `+before+`;
		            UPDATE penstock.schema_object SET definition = lower(definition) WHERE object LIKE 'view %'`)
		drift, err := migrations.Drift(t.Context(), c)
		lines := drift.Objects
		var other *migrations.OtherServerError
		if len(lines) > 0 || !errors.As(err, &other) {
			t.Errorf("server_major %s: drift is %q (%v)", before, lines, err)
		}
		done, err := migrations.Up(t.Context(), config(t, dsn))
		if err != nil || done.Applied != 0 || len(done.Notes) != 1 || !strings.Contains(done.Notes[0], "recorded anew") {
			t.Errorf("server_major %s: %+v (%v)", before, done, err)
		}
		if drift, err := migrations.Drift(t.Context(), c); err != nil || len(drift.Objects) > 0 {
			t.Errorf("server_major %s: drift is %q after the record (%v)", before, drift.Objects, err)
		}
	}
	for object, definition := range mustCatalog(t, c) {
		if strings.HasPrefix(definition, "t NOT NULL ") {
			t.Errorf("%s is a row in newer versions only", object)
		}
	}
}

// Each of these changes is one that the comparison of catalogs must see.
func TestCatalogSeesEveryKindOfChange(t *testing.T) {
	c := connect(t, pgtest.Empty(t))
	exec(t, c, `
		CREATE SCHEMA penstock;
		CREATE TYPE penstock.mood AS ENUM ('calm', 'hasty');
		CREATE DOMAIN penstock.name AS text CHECK (value <> '');
		CREATE SEQUENCE penstock.seq;
		CREATE TABLE penstock.a (id bigint PRIMARY KEY, note text DEFAULT 'x', n int);
		CREATE TABLE penstock.parts (id int) PARTITION BY LIST (id);
		CREATE VIEW penstock.v AS SELECT id FROM penstock.a;
		CREATE FUNCTION penstock.f() RETURNS int LANGUAGE sql AS 'SELECT 1';
		CREATE FUNCTION penstock.tr() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
		CREATE TRIGGER t BEFORE INSERT ON penstock.a FOR EACH ROW EXECUTE FUNCTION penstock.tr();`)
	read := func() map[string]string {
		found, err := migrations.Catalog(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	before := read()
	for _, change := range []string{
		"ALTER TYPE penstock.mood ADD VALUE 'brisk'",
		"ALTER DOMAIN penstock.name ADD CHECK (length(value) < 9)",
		"ALTER SEQUENCE penstock.seq CACHE 20",
		"ALTER TABLE penstock.a ADD COLUMN more int",
		"ALTER TABLE penstock.a ALTER COLUMN note SET DEFAULT 'y'",
		"ALTER TABLE penstock.a ALTER COLUMN n SET NOT NULL",
		"ALTER TABLE penstock.a ALTER COLUMN n TYPE bigint",
		"ALTER TABLE penstock.a ALTER COLUMN n SET STATISTICS 500",
		"ALTER TABLE penstock.a ALTER COLUMN note SET STORAGE external",
		"ALTER TABLE penstock.a SET (autovacuum_vacuum_scale_factor = 0.01)",
		"ALTER TABLE penstock.a ADD CONSTRAINT positive CHECK (n > 0) NOT VALID",
		"ALTER TABLE penstock.a VALIDATE CONSTRAINT positive",
		"CREATE INDEX a_n ON penstock.a (n) WHERE n > 3",
		"CREATE STATISTICS penstock.st ON id, n FROM penstock.a",
		"CREATE OR REPLACE VIEW penstock.v AS SELECT id + 0 AS id FROM penstock.a",
		"CREATE OR REPLACE FUNCTION penstock.f() RETURNS int LANGUAGE sql AS 'SELECT 2'",
		"ALTER FUNCTION penstock.f() SET search_path = penstock",
		"ALTER TABLE penstock.a DISABLE TRIGGER t",
		"ALTER TABLE penstock.a ENABLE ROW LEVEL SECURITY",
		"CREATE POLICY p ON penstock.a USING (id > 0)",
		"COMMENT ON TABLE penstock.a IS 'a'",
		"COMMENT ON COLUMN penstock.a.note IS 'a note'",
		"COMMENT ON FUNCTION penstock.f() IS 'f'",
	} {
		exec(t, c, change)
		after := read()
		if maps.Equal(before, after) {
			t.Errorf("not seen: %s", change)
		}
		before = after
	}
}
