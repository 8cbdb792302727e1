package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// describeSQL lists everything in the schema penstock that a migration can make, a line an object or column.
// Two databases with the same lines have the same schema: what is compared is what Postgres would say about each object.
// It runs with an empty search_path, so that every name it prints is qualified.
const describeSQL = `
WITH home AS (
	SELECT oid FROM pg_namespace WHERE nspname = 'penstock'
), rel AS (
	SELECT c.* FROM pg_class c JOIN home h ON c.relnamespace = h.oid
)
SELECT line FROM (
	SELECT format('schema penstock acl %s comment %s', n.nspacl, obj_description(n.oid, 'pg_namespace')) AS line
	  FROM pg_namespace n JOIN home h ON n.oid = h.oid
	UNION ALL
	SELECT format('relation %s kind %s persistence %s options %s partition of %s %s by %s view %s security %s %s replica %s acl %s comment %s',
	              r.relname, r.relkind, r.relpersistence, r.reloptions,
	              (SELECT string_agg(inhparent::regclass::text, ',' ORDER BY inhseqno) FROM pg_inherits WHERE inhrelid = r.oid),
	              pg_get_expr(r.relpartbound, r.oid), CASE WHEN r.relkind = 'p' THEN pg_get_partkeydef(r.oid) END,
	              CASE WHEN r.relkind IN ('v', 'm') THEN pg_get_viewdef(r.oid) END,
	              r.relrowsecurity, r.relforcerowsecurity, r.relreplident, r.relacl, obj_description(r.oid, 'pg_class'))
	  FROM rel r
	UNION ALL
	SELECT format('column %s %s %s %s not null %s default %s identity %s generated %s storage %s compression %s statistics %s options %s collation %s acl %s comment %s',
	              r.relname, row_number() OVER (PARTITION BY r.oid ORDER BY a.attnum), a.attname, format_type(a.atttypid, a.atttypmod),
	              a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attgenerated, a.attstorage, a.attcompression,
	              nullif(a.attstattarget, -1), a.attoptions, a.attcollation::regcollation, a.attacl, col_description(r.oid, a.attnum))
	  FROM rel r
	  JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
	  LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
	 WHERE r.relkind IN ('r', 'p', 'v', 'm', 'c')
	UNION ALL
	SELECT format('sequence %s %s start %s by %s from %s to %s cache %s cycle %s owned by %s',
	              r.relname, s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
	              (SELECT string_agg(format('%s.%s %s', refobjid::regclass, refobjsubid, deptype), ',') FROM pg_depend
	                WHERE classid = 'pg_class'::regclass AND objid = r.oid AND deptype IN ('a', 'i')
	                  AND refclassid = 'pg_class'::regclass))
	  FROM rel r JOIN pg_sequence s ON s.seqrelid = r.oid
	UNION ALL
	SELECT format('constraint %s on %s %s %s comment %s', c.conname, coalesce(nullif(c.conrelid, 0)::regclass::text, format_type(c.contypid, NULL)),
	              c.convalidated, pg_get_constraintdef(c.oid), obj_description(c.oid, 'pg_constraint'))
	  FROM pg_constraint c JOIN home h ON c.connamespace = h.oid
	UNION ALL
	SELECT format('index %s %s valid %s clustered %s replica %s', r.relname, pg_get_indexdef(r.oid), i.indisvalid, i.indisclustered, i.indisreplident)
	  FROM rel r JOIN pg_index i ON i.indexrelid = r.oid
	UNION ALL
	SELECT format('type %s %s labels %s base %s default %s comment %s', t.typname, t.typtype,
	              (SELECT string_agg(enumlabel, ',' ORDER BY enumsortorder) FROM pg_enum WHERE enumtypid = t.oid),
	              format_type(nullif(t.typbasetype, 0), t.typtypmod), t.typdefault, obj_description(t.oid, 'pg_type'))
	  FROM pg_type t JOIN home h ON t.typnamespace = h.oid
	 WHERE t.typtype IN ('e', 'd', 'r')
	UNION ALL
	SELECT format('function %s acl %s comment %s %s', p.oid::regprocedure, p.proacl, obj_description(p.oid, 'pg_proc'),
	              CASE WHEN p.prokind IN ('f', 'p') THEN pg_get_functiondef(p.oid) END)
	  FROM pg_proc p JOIN home h ON p.pronamespace = h.oid
	UNION ALL
	SELECT format('trigger on %s %s enabled %s', r.relname, pg_get_triggerdef(t.oid), t.tgenabled)
	  FROM rel r JOIN pg_trigger t ON t.tgrelid = r.oid AND NOT t.tgisinternal
	UNION ALL
	SELECT format('rule on %s %s', r.relname, pg_get_ruledef(w.oid))
	  FROM rel r JOIN pg_rewrite w ON w.ev_class = r.oid AND w.rulename <> '_RETURN'
	UNION ALL
	SELECT format('policy on %s %s %s permissive %s roles %s using %s check %s', r.relname, p.polname, p.polcmd, p.polpermissive,
	              p.polroles::regrole[], pg_get_expr(p.polqual, r.oid), pg_get_expr(p.polwithcheck, r.oid))
	  FROM rel r JOIN pg_policy p ON p.polrelid = r.oid
	UNION ALL
	SELECT format('statistics %s', pg_get_statisticsobjdef(s.oid)) FROM pg_statistic_ext s JOIN home h ON s.stxnamespace = h.oid
) AS described
ORDER BY line COLLATE "C"`

// describe returns the lines of describeSQL for the database behind dsn.
func describe(ctx context.Context, dsn string) ([]string, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "SET search_path = ''"); err != nil {
		return nil, fmt.Errorf("set search path: %w", err)
	}
	rows, err := conn.Query(ctx, describeSQL)
	if err != nil {
		return nil, fmt.Errorf("describe schema: %w", err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("describe schema: %w", err)
	}
	return lines, nil
}

var headerMajor = regexp.MustCompile(`^-- .* with pg_dump (\d+);`)

// writtenBy returns the major version of the pg_dump that wrote text.
func writtenBy(text string) (int, error) {
	found := headerMajor.FindStringSubmatch(text)
	if found == nil {
		return 0, errors.New("the schema file does not start with the line that says what wrote it: run make schema")
	}
	return strconv.Atoi(found[1])
}
