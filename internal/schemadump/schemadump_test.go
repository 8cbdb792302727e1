package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

const schemaFile = "../../migrations/schema.sql"

func TestSchemaFileMakesWhatTheMigrationsMake(t *testing.T) {
	text := readSchemaFile(t)
	fromMigrations, fromFile := pgtest.DSN(t), pgtest.Empty(t)
	execute(t, fromFile, text)
	want, got := mustDescribe(t, fromMigrations), mustDescribe(t, fromFile)
	for _, line := range missing(want, got) {
		t.Errorf("the migrations make this, schema.sql does not: %.200s", line)
	}
	for _, line := range missing(got, want) {
		t.Errorf("schema.sql makes this, the migrations do not: %.200s", line)
	}
	if t.Failed() {
		t.Log("run make schema and commit migrations/schema.sql")
	}
}

// The text, with its order and its comments, can be compared only where pg_dump and server are of the version that wrote it.
func TestSchemaFileIsTheDumpOfTheMigrations(t *testing.T) {
	text := readSchemaFile(t)
	writer, err := writtenBy(text)
	if err != nil {
		t.Fatal(err)
	}
	dsn := pgtest.DSN(t)
	server, err := serverMajor(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	if server != writer {
		t.Logf("the text is not compared: pg_dump %d wrote it and this server is %d; TestSchemaFileMakesWhatTheMigrationsMake compares the schemas", writer, server)
		return
	}
	dumped, err := dump(t.Context(), dsn)
	if errors.Is(err, errNoDumper) {
		t.Logf("the text is not compared: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if dumped != text {
		t.Errorf("schema.sql is not the dump of the migrations: run make schema\n%s", firstDifference(text, dumped))
	}
}

func TestDumpIsTheSameTwice(t *testing.T) {
	dsn := pgtest.DSN(t)
	first, err := dump(t.Context(), dsn)
	if errors.Is(err, errNoDumper) {
		t.Logf("nothing to compare: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	second, err := dump(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	if first != second {
		t.Errorf("two dumps of one database differ\n%s", firstDifference(first, second))
	}
}

func TestMissingDumperSaysWhatToInstall(t *testing.T) {
	_, err := findDumper(t.Context(), 99)
	if !errors.Is(err, errNoDumper) || !strings.Contains(err.Error(), "postgresql-client-99") {
		t.Errorf("got %v", err)
	}
}

func TestNormaliseRemovesWhatVaries(t *testing.T) {
	const dumped = `--
-- PostgreSQL database dump
--

\restrict Qf8s

-- Dumped from database version 15.18 (Debian 15.18-0+deb12u1)
-- Dumped by pg_dump version 15.18

SET lock_timeout = 0;
SET transaction_timeout = 0;

--
-- Name: penstock; Type: SCHEMA
--

CREATE SCHEMA penstock;


--
-- PostgreSQL database dump complete
--

\unrestrict Qf8s

`
	const want = "SET lock_timeout = 0;\n\n-- Name: penstock; Type: SCHEMA\n\nCREATE SCHEMA penstock;\n"
	if got := normalise(dumped); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Each of these changes is one that the comparison of catalogs must see.
func TestDescribeSeesEveryKindOfChange(t *testing.T) {
	dsn := pgtest.Empty(t)
	execute(t, dsn, `
		CREATE SCHEMA penstock;
		CREATE TYPE penstock.mood AS ENUM ('calm', 'hasty');
		CREATE DOMAIN penstock.name AS text CHECK (value <> '');
		CREATE SEQUENCE penstock.seq;
		CREATE TABLE penstock.a (id bigint PRIMARY KEY, note text DEFAULT 'x', n int);
		CREATE TABLE penstock.parts (id int) PARTITION BY LIST (id);
		CREATE TABLE penstock.part (id int);
		CREATE VIEW penstock.v AS SELECT id FROM penstock.a;
		CREATE FUNCTION penstock.f() RETURNS int LANGUAGE sql AS 'SELECT 1';
		CREATE FUNCTION penstock.tr() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
		CREATE TRIGGER t BEFORE INSERT ON penstock.a FOR EACH ROW EXECUTE FUNCTION penstock.tr();`)
	before := mustDescribe(t, dsn)
	for _, change := range []string{
		"ALTER TYPE penstock.mood ADD VALUE 'brisk'",
		"ALTER DOMAIN penstock.name ADD CHECK (length(value) < 9)",
		"ALTER SEQUENCE penstock.seq CACHE 20",
		"ALTER SEQUENCE penstock.seq OWNED BY penstock.a.id",
		"ALTER TABLE penstock.a ADD COLUMN more int",
		"ALTER TABLE penstock.a ALTER COLUMN note SET DEFAULT 'y'",
		"ALTER TABLE penstock.a ALTER COLUMN n SET NOT NULL",
		"ALTER TABLE penstock.a ALTER COLUMN n TYPE bigint",
		"ALTER TABLE penstock.a ALTER COLUMN n SET STATISTICS 500",
		"ALTER TABLE penstock.a ALTER COLUMN note SET STORAGE external",
		"ALTER TABLE penstock.a SET (autovacuum_vacuum_scale_factor = 0.01)",
		"ALTER TABLE penstock.a ADD CONSTRAINT positive CHECK (n > 0) NOT VALID",
		"ALTER TABLE penstock.a VALIDATE CONSTRAINT positive",
		"ALTER TABLE penstock.parts ATTACH PARTITION penstock.part FOR VALUES IN (1)",
		"CREATE INDEX a_n ON penstock.a (n) WHERE n > 3",
		"CREATE STATISTICS penstock.st ON id, n FROM penstock.a",
		"CREATE OR REPLACE VIEW penstock.v AS SELECT id + 0 AS id FROM penstock.a",
		"CREATE OR REPLACE FUNCTION penstock.f() RETURNS int LANGUAGE sql AS 'SELECT 2'",
		"ALTER FUNCTION penstock.f() SET search_path = penstock",
		"REVOKE EXECUTE ON FUNCTION penstock.f() FROM public",
		"ALTER TABLE penstock.a DISABLE TRIGGER t",
		"GRANT SELECT ON penstock.a TO public",
		"ALTER TABLE penstock.a ENABLE ROW LEVEL SECURITY",
		"CREATE POLICY p ON penstock.a USING (id > 0)",
		"COMMENT ON TABLE penstock.a IS 'a'",
		"COMMENT ON COLUMN penstock.a.note IS 'a note'",
		"COMMENT ON FUNCTION penstock.f() IS 'f'",
	} {
		execute(t, dsn, change)
		after := mustDescribe(t, dsn)
		if slices.Equal(before, after) {
			t.Errorf("not seen: %s", change)
		}
		before = after
	}
}

func readSchemaFile(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatalf("%v: run make schema", err)
	}
	return string(text)
}

func mustDescribe(t *testing.T, dsn string) []string {
	t.Helper()
	lines, err := describe(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) == 0 {
		t.Fatal("the database has no schema penstock")
	}
	return lines
}

// execute sends sql as one simple query, which may hold many statements.
func execute(t *testing.T, dsn, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("execute %.60q: %v", sql, err)
	}
}

// missing returns the lines of a that b lacks.
func missing(a, b []string) []string {
	var lines []string
	for _, line := range a {
		if _, found := slices.BinarySearch(b, line); !found {
			lines = append(lines, line)
		}
	}
	return lines
}

func firstDifference(a, b string) string {
	linesA, linesB := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(linesA), len(linesB)) {
		lineA, lineB := at(linesA, i), at(linesB, i)
		if lineA != lineB {
			return fmt.Sprintf("first difference, in line %d:\n- %s\n+ %s", i+1, lineA, lineB)
		}
	}
	return ""
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(end)"
}
