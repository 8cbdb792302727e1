package doctor

import "testing"

func TestWatchesThatRefuseChangesAreNamed(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.create_queue('changes', '{"kind": "change_log"}')`)
	exec(t, pool, `CREATE DOMAIN public.amount AS int`)
	exec(t, pool, `CREATE TYPE public.mood AS ENUM ('good')`)
	for _, table := range []string{"public.fine", "public.short", "public.moody", "public.earlier"} {
		exec(t, pool, `CREATE TABLE `+table+` (id int PRIMARY KEY, owner text, n public.amount, mood public.mood)`)
		exec(t, pool, `SELECT penstock.watch($1::text::regclass, 'changes')`, table)
		exec(t, pool, `INSERT INTO `+table+` VALUES (1)`)
	}
	want(t, find(t, pool, "watches", Config{}), Fine, "no watch refuses changes")
	exec(t, pool, `ALTER TABLE public.fine ADD more int, ALTER n TYPE bigint`)
	exec(t, pool, `UPDATE public.fine SET n = 2`)

	exec(t, pool, `DO $$ BEGIN EXECUTE (
		SELECT replace(pg_get_functiondef(tgfoid), 'OR EXISTS (SELECT FROM penstock.watch_changed_types',
		               'OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = TG_RELID
		                     AND penstock.watch_column_sql(TG_RELID, a.attname) IS DISTINCT FROM ''x'')
		                OR EXISTS (SELECT FROM penstock.watch_changed_types')
		  FROM pg_trigger WHERE tgrelid = 'public.earlier'::regclass AND tgname LIKE '%_insert'); END $$`)
	want(t, find(t, pool, "watches", Config{}), Warning, "public.earlier, for queue changes: its triggers are of an earlier build")

	exec(t, pool, `ALTER TABLE public.short DROP owner`)
	exec(t, pool, `ALTER TABLE public.moody ALTER n TYPE public.mood USING NULL`)
	f := find(t, pool, "watches", Config{})
	want(t, f, Critical, "public.moody, for queue changes: column n is of type public.mood",
		"public.short, for queue changes: column owner is gone", "penstock.watch")
	if len(f.Details) != 3 {
		t.Errorf("watches that refuse changes, and one that may: %q", f.Details)
	}
	for _, table := range []string{"public.short", "public.moody"} {
		if _, err := pool.Exec(t.Context(), `UPDATE `+table+` SET id = 2`); err == nil {
			t.Errorf("table %s takes changes", table)
		}
	}
}
