package migrations

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// catalogSQL lists what migrations make in the schema penstock, an object or column a row, as Postgres describes it.
// Partitions are left out, since queues and days make those, and so are rights, which belong to the installation, and
// the mark that CLUSTER leaves at an index, which no statement depends on.
// Constraints NOT NULL, which are rows from Postgres 18 on, are properties of columns here.
const catalogSQL = `
WITH rel AS (
	SELECT c.* FROM pg_class c WHERE c.relnamespace = to_regnamespace('penstock') AND NOT c.relispartition
)
SELECT CASE r.relkind WHEN 'v' THEN 'view ' ELSE 'table ' END || r.relname AS object,
       format('kind %s persistence %s options %s by %s view %s security %s %s replica %s comment %s',
              r.relkind, r.relpersistence, r.reloptions, CASE WHEN r.relkind = 'p' THEN pg_get_partkeydef(r.oid) END,
              CASE WHEN r.relkind IN ('v', 'm') THEN pg_get_viewdef(r.oid) END,
              r.relrowsecurity, r.relforcerowsecurity, r.relreplident, obj_description(r.oid, 'pg_class')) AS definition
  FROM rel r WHERE r.relkind IN ('r', 'p', 'v', 'm')
UNION ALL
SELECT format('column %s.%s', r.relname, a.attname),
       format('%s %s not null %s default %s identity %s generated %s storage %s compression %s statistics %s ' ||
              'options %s collation %s comment %s',
              row_number() OVER (PARTITION BY r.oid ORDER BY a.attnum), format_type(a.atttypid, a.atttypmod),
              a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attgenerated, a.attstorage,
              a.attcompression, nullif(a.attstattarget, -1), a.attoptions, a.attcollation::regcollation,
              col_description(r.oid, a.attnum))
  FROM rel r
  JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
 WHERE r.relkind IN ('r', 'p', 'm', 'c')
UNION ALL
SELECT 'sequence ' || r.relname,
       format('%s start %s by %s from %s to %s cache %s cycle %s', s.seqtypid::regtype, s.seqstart, s.seqincrement,
              s.seqmin, s.seqmax, s.seqcache, s.seqcycle)
  FROM rel r JOIN pg_sequence s ON s.seqrelid = r.oid
 WHERE r.relname !~ '^(accepted|removed)_[0-9]+$'
UNION ALL
SELECT format('constraint %s of %s', c.conname, coalesce(r.relname, 'a type')),
       format('%s %s comment %s', c.convalidated, pg_get_constraintdef(c.oid), obj_description(c.oid, 'pg_constraint'))
  FROM pg_constraint c LEFT JOIN rel r ON r.oid = c.conrelid
 WHERE c.connamespace = to_regnamespace('penstock') AND (c.conrelid = 0 OR r.oid IS NOT NULL)
   AND c.contype <> 'n'
UNION ALL
SELECT 'index ' || r.relname,
       format('%s valid %s clustered f replica %s', pg_get_indexdef(r.oid), i.indisvalid, i.indisreplident)
  FROM rel r JOIN pg_index i ON i.indexrelid = r.oid
UNION ALL
SELECT 'type ' || t.typname,
       format('%s labels %s base %s default %s comment %s', t.typtype,
              (SELECT string_agg(enumlabel, ',' ORDER BY enumsortorder) FROM pg_enum WHERE enumtypid = t.oid),
              format_type(nullif(t.typbasetype, 0), t.typtypmod), t.typdefault, obj_description(t.oid, 'pg_type'))
  FROM pg_type t
 WHERE t.typnamespace = to_regnamespace('penstock') AND t.typtype IN ('e', 'd', 'r')
UNION ALL
SELECT 'function ' || p.oid::regprocedure,
       format('%s comment %s', CASE WHEN p.prokind IN ('f', 'p') THEN pg_get_functiondef(p.oid) END,
              obj_description(p.oid, 'pg_proc'))
  FROM pg_proc p WHERE p.pronamespace = to_regnamespace('penstock') AND p.proname !~ '^watch_[0-9]'
UNION ALL
SELECT format('trigger %s on %s', t.tgname, r.relname), format('%s enabled %s', pg_get_triggerdef(t.oid), t.tgenabled)
  FROM rel r JOIN pg_trigger t ON t.tgrelid = r.oid AND NOT t.tgisinternal
UNION ALL
SELECT format('rule %s on %s', w.rulename, r.relname), pg_get_ruledef(w.oid)
  FROM rel r JOIN pg_rewrite w ON w.ev_class = r.oid AND w.rulename <> '_RETURN'
UNION ALL
SELECT format('policy %s on %s', p.polname, r.relname),
       format('%s permissive %s roles %s using %s check %s', p.polcmd, p.polpermissive, p.polroles::regrole[],
              pg_get_expr(p.polqual, r.oid), pg_get_expr(p.polwithcheck, r.oid))
  FROM rel r JOIN pg_policy p ON p.polrelid = r.oid
UNION ALL
SELECT 'statistics ' || s.stxname, pg_get_statisticsobjdef(s.oid) FROM pg_statistic_ext s
 WHERE s.stxnamespace = to_regnamespace('penstock')`

// printSettingsSQL sets what texts of the catalog depend on. Without a search_path every name is qualified.
const printSettingsSQL = `
SET LOCAL search_path = ''; SET LOCAL quote_all_identifiers = off; SET LOCAL standard_conforming_strings = on;
SET LOCAL bytea_output = hex; SET LOCAL extra_float_digits = 1;
SET LOCAL DateStyle = 'ISO, YMD'; SET LOCAL IntervalStyle = postgres; SET LOCAL TimeZone = 'UTC'`

// catalog returns the definition of each object in the transaction's database.
func catalog(ctx context.Context, tx pgx.Tx) (map[string]string, error) {
	if _, err := tx.Exec(ctx, printSettingsSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return nil, fmt.Errorf("set what texts depend on: %w", err)
	}
	found, err := objects(ctx, tx, catalogSQL)
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	return found, nil
}

const recordedSQL = `SELECT object, definition FROM penstock.schema_object`

// recorded returns the objects as they were when the schema was applied; none before the first time.
func recorded(ctx context.Context, tx pgx.Tx) (map[string]string, error) {
	var there bool
	err := tx.QueryRow(ctx, `SELECT to_regclass('penstock.schema_object') IS NOT NULL`).Scan(&there)
	if err != nil || !there {
		return nil, err
	}
	return objects(ctx, tx, recordedSQL)
}

func objects(ctx context.Context, tx pgx.Tx, sql string) (map[string]string, error) {
	rows, _ := tx.Query(ctx, sql)
	found := map[string]string{}
	var object, definition string
	_, err := pgx.ForEachRow(rows, []any{&object, &definition}, func() error {
		found[object] = definition
		return nil
	})
	return found, err
}

// changes are objects that differ between the record and the catalog.
type changes map[string]change

// change is what an object is in the record and in the catalog. An empty definition means a missing object.
type change struct{ recorded, found string }

func differences(recorded, found map[string]string) changes {
	list := changes{}
	for object, definition := range recorded {
		if found[object] != definition {
			list[object] = change{definition, found[object]}
		}
	}
	for object, definition := range found {
		if _, known := recorded[object]; !known {
			list[object] = change{"", definition}
		}
	}
	return list
}

// OtherServerError says that the schema was recorded on another major version of Postgres, which prints some objects
// otherwise: nothing was compared.
type OtherServerError struct{ Recorded, Running int } // Recorded is 0 if it is not known

func (e *OtherServerError) Error() string {
	on := "a server of unknown version"
	if e.Recorded > 0 {
		on = fmt.Sprintf("Postgres %d", e.Recorded)
	}
	return fmt.Sprintf("the schema was recorded on %s and this is Postgres %d", on, e.Running)
}

// The column is read as a key: a database of before may lack it.
const serverMajorSQL = `
SELECT coalesce((SELECT to_jsonb(v) ->> 'server_major'
                   FROM penstock.schema_version v ORDER BY id DESC LIMIT 1)::int, 0),
       current_setting('server_version_num')::int / 10000`

// changedByHand compares the catalog with the record. Before the first record nothing can have been changed.
// The error is an *OtherServerError if the two are not comparable; the changes are then the views and functions beyond
// the record, whose names every version prints alike. Only the transaction that records them makes others.
func changedByHand(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
},
) (changes, error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // it only reads
	was, err := recorded(ctx, tx)
	if err != nil {
		return nil, fmt.Errorf("read the recorded schema: %w", err)
	}
	if len(was) == 0 {
		return nil, nil
	}
	var on OtherServerError
	if err := tx.QueryRow(ctx, serverMajorSQL).Scan(&on.Recorded, &on.Running); err != nil {
		return nil, fmt.Errorf("read the version of the server: %w", err)
	}
	is, err := catalog(ctx, tx)
	if err != nil {
		return nil, err
	}
	list := differences(was, is)
	if on.Recorded != on.Running {
		maps.DeleteFunc(list, func(object string, c change) bool {
			named := strings.HasPrefix(object, "view ") || strings.HasPrefix(object, "function ")
			return !named || c.recorded != ""
		})
		return list, &on
	}
	return list, nil
}

// recordSQL keeps the release of functions that are not in $4: the set has not written them.
const recordSQL = `
INSERT INTO penstock.schema_object AS o (object, definition, release)
SELECT n.object, n.definition, $3
  FROM unnest($1::text[], $2::text[]) n(object, definition)
    ON CONFLICT (object) DO UPDATE
   SET definition = excluded.definition,
       release = CASE WHEN o.object NOT LIKE 'function %' OR o.object = ANY ($4) THEN excluded.release
                      ELSE o.release END`

const (
	forgetSQL = `DELETE FROM penstock.schema_object WHERE object <> ALL ($1)`

	recordServerSQL = `
UPDATE penstock.schema_version SET server_major = current_setting('server_version_num')::int / 10000
 WHERE id = (SELECT max(id) FROM penstock.schema_version)`
)

// recordSchema records the catalog, with the release for the functions that were written. What was changed by hand
// before, and not again since, keeps its earlier record: it goes on to differ.
func recordSchema(ctx context.Context, tx pgx.Tx, byHand changes, release int, written []string) error {
	is, err := catalog(ctx, tx)
	if err != nil {
		return err
	}
	for object, change := range byHand {
		if is[object] != change.found {
			continue
		}
		if change.recorded == "" {
			delete(is, object)
		} else {
			is[object] = change.recorded
		}
	}
	names := slices.Sorted(maps.Keys(is))
	definitions := make([]string, len(names))
	for i, name := range names {
		definitions[i] = is[name]
	}
	if _, err := tx.Exec(ctx, recordSQL, names, definitions, release, written); err != nil {
		return fmt.Errorf("record the schema: %w", err)
	}
	if _, err := tx.Exec(ctx, forgetSQL, names); err != nil {
		return fmt.Errorf("record the schema: %w", err)
	}
	if _, err := tx.Exec(ctx, recordServerSQL); err != nil {
		return fmt.Errorf("record the version of the server: %w", err)
	}
	return nil
}

const brokenSQL = `
SELECT format('queue %s has no table entry_%s', q.name, q.name) FROM penstock.queue q
 WHERE NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                    WHERE i.inhparent = 'penstock.entry'::regclass AND c.relname = 'entry_' || q.name)
UNION ALL
SELECT format('index %s is not valid', c.relname) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE c.relnamespace = 'penstock'::regnamespace AND NOT i.indisvalid
 ORDER BY 1`

// Differences are what a schema has that migrations and functions did not make, and the other way round: a line each,
// in order.
type Differences struct {
	Objects    []string // that statements may depend on, or that are not cleaned any more
	Parameters []string // of storage and of statistics, of objects that are otherwise as they were
}

// Drift compares the schema of a database with the one that was recorded when migrations and functions were
// applied last. Indexes beyond those of the migrations are expected, and rights are not compared. Invalid indexes and
// queues without their table are named as well, also with an *OtherServerError, which says that the rest is not
// comparable until Up has recorded it anew.
func Drift(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	Queryer
},
) (Differences, error) {
	changed, err := changedByHand(ctx, db)
	var other *OtherServerError
	if err != nil && !errors.As(err, &other) {
		return Differences{}, fmt.Errorf("compare the schema: %w", err)
	}
	if other != nil {
		changed = nil
	}
	var d Differences
	for object, change := range changed {
		parameters, only := parameterChanges(object, change)
		switch {
		case change.found == "":
			d.Objects = append(d.Objects, object+" is missing")
		case only:
			d.Parameters = append(d.Parameters, parameters...)
		case change.recorded != "":
			d.Objects = append(d.Objects, object+" was changed")
		case !strings.HasPrefix(object, "index "):
			d.Objects = append(d.Objects, object+" is not of any migration")
		}
	}
	slices.Sort(d.Objects)
	slices.Sort(d.Parameters)
	rows, _ := db.Query(ctx, brokenSQL)
	broken, brokenErr := pgx.CollectRows(rows, pgx.RowTo[string])
	if brokenErr != nil {
		return Differences{}, fmt.Errorf("compare the schema: %w", brokenErr)
	}
	d.Objects = append(d.Objects, broken...)
	return d, err
}
