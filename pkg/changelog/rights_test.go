package changelog

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// The triggers of a watch run with the rights of whoever made it. A role that may only use the schema, or that owns the
// watched table, must not be able to run code with them: by a trigger on a table of its own, or by a type whose cast to
// json is a function of its own.
func TestRoleWithoutRightsRunsNothingThroughAWatch(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var role string
	if err := pool.QueryRow(t.Context(), `SELECT 'lowly_' || substr(md5(random()::text), 1, 12)`).Scan(&role); err != nil {
		t.Fatal(err)
	}
	exec(`CREATE ROLE ` + role)
	t.Cleanup(func() {
		if _, err := pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+` CASCADE; DROP ROLE `+role); err != nil {
			t.Error(err)
		}
	})
	exec(fmt.Sprintf(`
		GRANT USAGE ON SCHEMA penstock TO %[1]s;
		CREATE SCHEMA app AUTHORIZATION %[1]s;
		CREATE TABLE public.ran (by_whom text);
		GRANT INSERT ON public.ran TO %[1]s;
		SELECT penstock.create_queue('changes', '{"kind": "change_log"}');
		SET ROLE %[1]s;
		CREATE TYPE app.mood AS ENUM ('good', 'bad');
		CREATE FUNCTION app.convert(app.mood) RETURNS json LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.ran VALUES (current_user);
			RETURN '"converted"';
		END $$;
		CREATE CAST (app.mood AS json) WITH FUNCTION app.convert(app.mood);
		CREATE TABLE app.watched (id integer PRIMARY KEY, mood app.mood, n integer);
		CREATE TABLE app.own (id integer PRIMARY KEY, mood app.mood, n integer);
		CREATE FUNCTION app.number(app.mood) RETURNS integer LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.ran VALUES (current_user);
			RETURN 1;
		END $$;
		CREATE CAST (app.mood AS integer) WITH FUNCTION app.number(app.mood) AS IMPLICIT;
		CREATE TABLE app.grouped (id integer PRIMARY KEY, kind integer, n integer);
		RESET ROLE;
		SELECT penstock.watch('app.watched', 'changes');
		SELECT penstock.watch('app.grouped', 'changes', ARRAY['n'], ARRAY['kind'])`, role))
	var function string
	err = pool.QueryRow(t.Context(), `SELECT tgfoid::regprocedure FROM pg_trigger
		WHERE tgrelid = 'app.watched'::regclass AND tgname LIKE '%_insert'`).Scan(&function)
	if err != nil {
		t.Fatal(err)
	}
	asRole := func(sql string) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE `+role); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), sql)
			return err
		})
	}
	err = asRole(fmt.Sprintf(`CREATE TRIGGER mine AFTER INSERT ON app.own REFERENCING NEW TABLE AS new_rows
		FOR EACH STATEMENT EXECUTE FUNCTION %s`, function))
	if postgres.Code(err) != "42501" {
		t.Errorf("the role attaches the function to a table of its own: %v", err)
	}
	// An enum is recorded as its text, without the cast.
	if err := asRole(`INSERT INTO app.watched VALUES (1, 'good', 1)`); err != nil {
		t.Errorf("the role writes to the table: %v", err)
	}
	var mood string
	err = pool.QueryRow(t.Context(), `SELECT payload->'to'->>'mood' FROM penstock.entry`).Scan(&mood)
	if err != nil || mood != "good" {
		t.Errorf("the enum is recorded as %q, %v", mood, err)
	}
	// A column of another type than it was watched with.
	if err := asRole(`ALTER TABLE app.watched ALTER n TYPE app.mood USING 'bad'`); err != nil {
		t.Fatal(err)
	}
	if err := asRole(`UPDATE app.watched SET n = 'good'`); postgres.Code(err) != "PS006" {
		t.Errorf("a column became of the role's type: %v", err)
	}
	// Rows are compared by the primary key, too, where the keys do not identify them.
	if err := asRole(`ALTER TABLE app.grouped ALTER id TYPE app.mood USING 'bad'`); err != nil {
		t.Fatal(err)
	}
	if err := asRole(`UPDATE app.grouped SET n = 8`); postgres.Code(err) != "PS006" {
		t.Errorf("a column of the primary key became of the role's type: %v", err)
	}
	if err := asRole(`ALTER TABLE app.watched ALTER n TYPE bigint USING 7`); err != nil {
		t.Fatal(err)
	}
	if err := asRole(`UPDATE app.watched SET n = 8`); err != nil {
		t.Errorf("a column became of another type of Postgres: %v", err)
	}
	var n int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM public.ran`).Scan(&n); err != nil || n != 0 {
		t.Errorf("the role's function ran %d times (%v)", n, err)
	}
}
