package migrations_test

import (
	"context"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

const othersSQL = `
SELECT count(*) FROM pg_namespace n
  JOIN (SELECT relnamespace, relowner FROM pg_class UNION ALL
        SELECT pronamespace, proowner FROM pg_proc) o(namespace, owner) ON o.namespace = n.oid AND o.owner <> n.nspowner
 WHERE n.nspname = 'penstock'`

// ownedByAnother returns an empty database that another role may migrate, a session of the superuser, and the
// configuration of that role.
func ownedByAnother(t *testing.T) (dsn string, c *pgx.Conn, asOwner *pgx.ConnConfig) {
	t.Helper()
	dsn = pgtest.Empty(t)
	c = connect(t, dsn)
	owner := query[string](t, c, `SELECT 'owner ' || substr(md5(random()::text), 1, 12)`)
	quoted := pgx.Identifier{owner}.Sanitize()
	exec(t, c, `CREATE ROLE `+quoted+`; GRANT ALL ON SCHEMA public TO `+quoted)
	t.Cleanup(func() { _, _ = c.Exec(context.Background(), `DROP OWNED BY `+quoted+` CASCADE; DROP ROLE `+quoted) })
	exec(t, c, `DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO `+quoted+`', current_database()); END $$`)
	asOwner = config(t, dsn)
	asOwner.RuntimeParams["role"] = owner
	return dsn, c, asOwner
}

// What a superuser made while it migrated was its own: the owner could not replace it at the next upgrade. What it made
// by hand is not replaced by anybody.
func TestASuperuserMigratesAsTheOwnerOfTheSchema(t *testing.T) {
	dsn, c, asOwner := ownedByAnother(t)
	if _, err := migrations.Up(t.Context(), asOwner); err != nil {
		t.Fatal(err)
	}
	exec(t, c, `
CREATE VIEW penstock.my_queues AS SELECT name FROM penstock.queue;
GRANT SELECT ON penstock.my_queues TO pg_monitor;
CREATE TABLE penstock.mine (id integer);
CREATE FUNCTION penstock.ago(mine integer) RETURNS integer LANGUAGE sql AS 'SELECT 1'`)
	byHand := query[int64](t, c, othersSQL)

	upWith(t, dsn, newFunction(t, "later"), migrations.Release)
	if n := query[int64](t, c, othersSQL); n != byHand {
		t.Errorf("%d objects belong to others than the owner of the schema, want the %d made by hand", n, byHand)
	}
	if _, err := migrations.UpWith(t.Context(), asOwner, newFunction(t, "last"), migrations.Release); err != nil {
		t.Errorf("the owner migrates after a superuser: %v", err)
	}
	columns := changed(t, "views.sql", "CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT l.queue,",
		"CREATE OR REPLACE VIEW penstock.stuck AS\nSELECT 1 AS first, l.queue,")
	if _, err := migrations.UpWith(t.Context(), asOwner, columns, migrations.Release); err != nil {
		t.Errorf("the owner changes columns beside a view of a superuser: %v", err)
	}

	// Objects that belong to a superuser already can be replaced by it alone.
	exec(t, c, `ALTER FUNCTION penstock.later() OWNER TO CURRENT_USER`)
	if _, err := migrations.UpWith(t.Context(), asOwner, newFunction(t, "later"), migrations.Release+1); err == nil {
		t.Error("the owner replaced a function of a superuser")
	}
	upWith(t, dsn, newFunction(t, "later"), migrations.Release+1)
}

// newFunction is a program with one more function.
func newFunction(t *testing.T, name string) fstest.MapFS {
	t.Helper()
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	file := functions["functions/explain.sql"]
	file.Data = append(file.Data, []byte("\nCREATE OR REPLACE FUNCTION penstock."+name+"() RETURNS integer LANGUAGE sql AS 'SELECT 1';\n")...)
	return functions
}
