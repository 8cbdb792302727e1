-- Change log: changes of a watched table by a statement become entries of a change_log queue.

-- depth_max is the largest number of entries between an entry and a push from outside.
-- Callers: check_depth.
CREATE OR REPLACE FUNCTION penstock.depth_max() RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif(current_setting('penstock.depth_max', true), '')::integer, 16)
$$;

-- check_depth returns the depth of what this transaction pushes and refuses a depth above depth_max
-- (16; ALTER DATABASE ... SET penstock.depth_max changes it). The error names the entry that the
-- transaction works for and the queue that it pushes to. It is also the default of entry.depth.
-- Callers: make_watch_function.
-- SQLSTATE: PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.check_depth(target text DEFAULT 'a queue') RETURNS smallint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    depth integer := current_setting('penstock.depth')::integer;
BEGIN
    IF depth > penstock.depth_max() THEN
        RAISE EXCEPTION 'loop: % pushes to %, at depth % of at most %', current_setting('penstock.working_for', true),
            target, depth, penstock.depth_max()
            USING ERRCODE = 'PS011', HINT = 'The entries push one another without end. Break the circle: do not watch what the handler writes, or write only what differs.';
    END IF;
    RETURN depth;
END $$;

-- work_for records in the transaction that its pushes, by itself or through a watched table, are
-- caused by these entries.
-- Locks: none.
-- Callers: pkg/changelog, pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.work_for(queue integer, entries bigint[]) RETURNS integer
LANGUAGE sql AS $$
    SELECT set_config('penstock.depth', (coalesce(max(e.depth), 0) + 1)::text, true)::integer
           + 0 * length(set_config('penstock.working_for', format('entry %s of queue "%s"', min(e.id), (SELECT name FROM penstock.queue q WHERE q.id = $1)), true))
      FROM penstock.entry e WHERE e.queue_id = $1 AND e.id = ANY ($2)
$$;

-- keep_watch_queue refuses to drop a queue that records changes: the triggers would refuse every
-- writer of the table.
-- Locks: the rows of watch, in a transaction that has the row of the queue.
-- Callers: trigger keep_watch_queue.
-- SQLSTATE: PS006 the queue records changes of a table.
CREATE OR REPLACE FUNCTION penstock.keep_watch_queue() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    watched text := (SELECT string_agg(w.watched::text, ', ') FROM penstock.watch w JOIN pg_class c ON c.oid = w.watched
                     WHERE w.queue_id = OLD.id);
BEGIN
    IF watched IS NOT NULL THEN
        RAISE EXCEPTION 'queue "%" records changes of %', OLD.name, watched USING ERRCODE = 'PS006',
            HINT = 'End its watches first, in SQL: penstock.unwatch.';
    END IF;
    DELETE FROM penstock.watch WHERE queue_id = OLD.id;
    RETURN OLD;
END $$;

-- watch_value is a column's value as a change records it. A value of over 8 kB is left out, and so is one with a number
-- that no payload may have: a payload that is refused would refuse the statement that changed the table.
-- Callers: watch_changes_sql.
CREATE OR REPLACE FUNCTION penstock.watch_value(v jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN -- in plpgsql, whose plans a session keeps: one in SQL would be planned for each statement
    -- See check_payloads for the texts of up to 300 bytes.
    RETURN CASE WHEN pg_column_size(v) > 8192
                  OR CASE WHEN jsonb_typeof(v) NOT IN ('number', 'object', 'array') THEN false
                          WHEN pg_column_size(v) > 500 THEN penstock.has_wild_number(v)
                          WHEN octet_length(v::text) > 300 THEN penstock.has_wild_number(v) END
                THEN jsonb_build_object('omitted', pg_column_size(v)) ELSE v END;
END $$;

-- watch_json is a json value as jsonb. One that jsonb does not take (a NUL, half of a surrogate pair, a number of more
-- digits) becomes its text.
-- Callers: watch_field_sql.
CREATE OR REPLACE FUNCTION penstock.watch_json(v json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN v::jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN to_jsonb(v::text);
END $$;

-- watch_lock_key returns the lock key of a change where that of its queue's grouping may not be one: a hash of it. It
-- is null for all others.
-- Callers: push_changes.
CREATE OR REPLACE FUNCTION penstock.watch_lock_key(change jsonb, path text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    key text := penstock.lock_key_of(change, path);
BEGIN
    IF key = '' OR penstock.is_solo(key) OR octet_length(key) > 512 THEN
        RETURN 'sha256:' || encode(sha256(convert_to(key, 'UTF8')), 'hex');
    END IF;
    RETURN NULL;
END $$;

-- push_changes pushes the changes that a statement made. No value of the table is a reason for which it refuses them:
-- the statement would fail. Of a change that is beyond payload_limit the values are left out.
-- Locks: those of push_many.
-- Callers: make_watch_function.
-- SQLSTATE: those of push_many.
CREATE OR REPLACE FUNCTION penstock.push_changes(queue_name text, changes jsonb[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
BEGIN
    changes := ARRAY(
        SELECT CASE WHEN pg_column_size(u.c) > q.payload_limit
                    THEN u.c || (SELECT jsonb_object_agg(f.key, jsonb_build_object('omitted', pg_column_size(f.value)))
                                   FROM jsonb_each(u.c) f
                                  WHERE f.key IN ('from', 'to') AND f.value <> 'null')
                    ELSE u.c END
          FROM unnest(changes) WITH ORDINALITY u(c, i) ORDER BY u.i);
    IF q.grouping IS NULL THEN
        PERFORM penstock.push_many(queue_name, changes);
    ELSE
        PERFORM penstock.push_many(queue_name, changes, ARRAY(
            SELECT penstock.watch_lock_key(u.c, q.grouping) FROM unnest(changes) WITH ORDINALITY u(c, i) ORDER BY u.i));
    END IF;
END $$;

-- watch_base_type is the type below a domain, and any other type itself.
-- Callers: watch_column_sql, watch_field_sql, watch_object_sql, watch_differs_sql, watch_types.
CREATE OR REPLACE FUNCTION penstock.watch_base_type(type oid) RETURNS oid
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE base AS (
        SELECT t.oid, t.typtype, t.typbasetype FROM pg_type t WHERE t.oid = $1
         UNION ALL
        SELECT t.oid, t.typtype, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.typbasetype
         WHERE b.typtype = 'd'
    )
    SELECT b.oid FROM base b WHERE b.typtype <> 'd'
$$;

-- watch_column_sql is the expression by which a trigger of watch turns a column into jsonb; the row
-- is %1$s in it. The trigger runs with its owner's rights, and to_jsonb() calls a cast to json that
-- any role may have made for its own type. So only types of pg_catalog are converted by to_jsonb(),
-- domains as the type below them; all others, enums for one, become the text that the type's output
-- function writes, which only a superuser can make. It must stay as it is while there are triggers of
-- earlier builds that keep its text and compare it: those that penstock migrate up may not replace.
-- Callers: watch_field_sql.
CREATE OR REPLACE FUNCTION penstock.watch_column_sql(watched regclass, column_name text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN b.oid = a.atttypid AND b.typnamespace = 'pg_catalog'::regnamespace
                THEN format('to_jsonb(%%1$s.%s)', quoted.name)
                WHEN b.typnamespace = 'pg_catalog'::regnamespace
                    THEN format('to_jsonb(%%1$s.%s::pg_catalog.%s)', quoted.name,
                                replace(quote_ident(b.typname), '%', '%%'))
                ELSE format('CASE WHEN %%1$s.%1$s IS NOT NULL THEN to_jsonb(format(''%%%%s'', %%1$s.%1$s)) END',
                            quoted.name) END
      FROM pg_attribute a JOIN pg_type b ON b.oid = penstock.watch_base_type(a.atttypid)
     CROSS JOIN (SELECT replace(quote_ident(column_name), '%', '%%') AS name) quoted
     WHERE a.attrelid = watched AND a.attname = column_name
$$;

-- watch_field_sql is the expression of watch_column_sql, for json and domains over it by watch_json. A text or bytea of
-- over 8 kB is left out before it is converted: jsonb holds no text of more than 256 MB, which a bytea of half of that
-- is, and a large value that is stored out of line need not be read.
-- Callers: watch_changes_sql, watch_key_sql, watch_object_sql.
CREATE OR REPLACE FUNCTION penstock.watch_field_sql(watched regclass, column_name text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN b.base = 'json'::regtype THEN format('to_jsonb(penstock.watch_json(%s))', v.value)
                WHEN b.base IN ('text'::regtype, 'varchar'::regtype, 'bytea'::regtype)
                THEN format('CASE WHEN octet_length(%1$s) > 8192 '
                            'THEN jsonb_build_object(''omitted'', octet_length(%1$s)) ELSE %2$s END', v.value, x.text)
                ELSE x.text END
      FROM pg_attribute a CROSS JOIN penstock.watch_column_sql(watched, column_name) x(text)
     CROSS JOIN LATERAL (SELECT penstock.watch_base_type(a.atttypid) AS base) b
     CROSS JOIN LATERAL (SELECT substr(x.text, length('to_jsonb(') + 1, length(x.text) - length('to_jsonb()'))
                             AS value) v
     WHERE a.attrelid = watched AND a.attname = column_name
$$;

-- watch_object_sql is the expression of watch_field_sql for a key as a change names its object. A numeric is without
-- zeros at its end: equal numbers are one object and have one lock key.
-- Callers: watch_changes_sql.
CREATE OR REPLACE FUNCTION penstock.watch_object_sql(watched regclass, column_name text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN penstock.watch_base_type(a.atttypid) = 'numeric'::regtype
                THEN 'to_jsonb(trim_scale(' || substr(x.text, length('to_jsonb(') + 1) || ')' ELSE x.text END
      FROM pg_attribute a CROSS JOIN penstock.watch_field_sql(watched, column_name) x(text)
     WHERE a.attrelid = watched AND a.attname = column_name
$$;

-- watch_differs_sql is the condition that an UPDATE has changed a column, where the values that it records cannot tell
-- since they may be left out, and null for all others.
-- Callers: watch_changes_sql.
CREATE OR REPLACE FUNCTION penstock.watch_differs_sql(watched regclass, column_name text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN b.base = 'bytea'::regtype THEN format('o.%1$s IS DISTINCT FROM n.%1$s', quoted.name)
                WHEN b.base IN ('text'::regtype, 'varchar'::regtype)
                THEN format('o.%1$s IS DISTINCT FROM n.%1$s COLLATE "C"', quoted.name)
                ELSE 'NULL' END
      FROM pg_attribute a CROSS JOIN LATERAL (SELECT penstock.watch_base_type(a.atttypid) AS base) b
     CROSS JOIN (SELECT replace(quote_ident(column_name), '%', '%%') AS name) quoted
     WHERE a.attrelid = watched AND a.attname = column_name
$$;

-- watch_key_sql is the expression by which rows before and after an UPDATE are joined; the row is %1$s in it. Texts are
-- compared byte by byte: an object that is called otherwise is another one, also where its collation calls the names
-- equal. Types that have no equality which can be hashed or sorted are compared as they are recorded, and so are those
-- that extensions brought, whose operators are not on the search path of the trigger. A column that may be null is
-- compared within an array: arrays take nulls for equal, and can be hashed and sorted where their elements can.
-- Callers: watch_changes_sql.
CREATE OR REPLACE FUNCTION penstock.watch_key_sql(watched regclass, column_name text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN a.attnotnull THEN k.value ELSE 'ARRAY[' || k.value || ']' END
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     CROSS JOIN (SELECT replace(quote_ident(column_name), '%', '%%') AS name) quoted
     CROSS JOIN LATERAL (
        SELECT CASE WHEN t.typnamespace <> 'pg_catalog'::regnamespace
                    THEN penstock.watch_field_sql(watched, column_name)
                    WHEN t.typcategory = 'S' AND a.attcollation <> 0
                    THEN format('%%1$s.%s COLLATE "C"', quoted.name)
                    WHEN EXISTS (SELECT FROM pg_opclass c JOIN pg_am m ON m.oid = c.opcmethod
                                 WHERE m.amname = 'btree' AND c.opcdefault AND c.opcintype = t.oid)
                    THEN format('%%1$s.%s', quoted.name)
                    ELSE penstock.watch_field_sql(watched, column_name) END AS value) k
     WHERE a.attrelid = watched AND a.attname = column_name
$$;

-- watch_identifies returns whether a unique index says that columns identify a row at the end of each statement. One
-- with a column that may be null says so of some rows alone.
-- Callers: watch_changes_sql, watch_row_columns.
CREATE OR REPLACE FUNCTION penstock.watch_identifies(watched regclass, columns text[]) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM pg_index i
         WHERE i.indrelid = watched AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
           AND NOT EXISTS (SELECT FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, n)
                             LEFT JOIN pg_attribute a ON a.attrelid = watched AND a.attnum = k.attnum
                            WHERE k.n <= i.indnkeyatts AND (a.attnotnull AND a.attname = ANY (columns)) IS NOT TRUE))
$$;

-- watch_row_columns are the columns by which a row before an UPDATE is joined to that after it: the keys and, where no
-- unique index says that they identify a row, the primary key, but for the columns by which a row of a partitioned
-- table changes its partition.
-- Callers: watch_changes_sql, watch_types.
CREATE OR REPLACE FUNCTION penstock.watch_row_columns(watched regclass, keys text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN penstock.watch_identifies(watched, keys) THEN keys ELSE keys || ARRAY(
        SELECT a.attname::text FROM pg_index i
          JOIN pg_attribute a ON a.attrelid = watched AND a.attnum = ANY (i.indkey)
         WHERE i.indrelid = watched AND i.indisprimary AND a.attname <> ALL (keys)
           AND NOT EXISTS (
               SELECT FROM pg_partition_tree(coalesce(pg_partition_root(watched), watched)) t
                 JOIN pg_partitioned_table p ON p.partrelid = t.relid
                 JOIN pg_attribute x ON x.attrelid = p.partrelid AND x.attnum = ANY (p.partattrs)
                WHERE x.attname = a.attname)) END
$$;

-- watch_changes_sql is the query behind a watch: one row {"table", "object", "field", "from", "to"}
-- for each field that differs. A row that was inserted or deleted is one change, with field null
-- and the watched columns in "to" or "from". An update that changes keys is a deleted and an
-- inserted row. A full join can only be hashed or merged, so that the plan of the first statement
-- of a session, of one row perhaps, is right for a million.
--
-- Rows before an UPDATE are joined to those after it by watch_row_columns. Where these do not identify a row, the n-th
-- of equal rows before is joined to the n-th after it: transition tables have them in one order. So it is where actions
-- of foreign keys update rows: a statement that fires two of them on a row has two versions of it in each table.
--
-- The columns that it adds to the rows are called like system columns, since a table can have none of these names: xmin
-- is true, cmin the position of a row in its table, cmax its position among equal rows.
-- Callers: make_watch_function.
CREATE OR REPLACE FUNCTION penstock.watch_changes_sql(
    watched regclass,
    op      text,
    columns text[],
    keys    text[]
) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $_$
DECLARE
    -- Names may hold a per cent sign, which format would read.
    label   text := (SELECT replace(quote_literal(n.nspname || '.' || c.relname), '%', '%%')
                     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = watched);
    object  text := CASE cardinality(keys)
                    WHEN 1 THEN format('penstock.watch_value(%s)', penstock.watch_object_sql(watched, keys[1]))
                    ELSE format('jsonb_build_object(%s)', (
                        SELECT string_agg(format('%L, penstock.watch_value(%s)', replace(k, '%', '%%'),
                                                 penstock.watch_object_sql(watched, k)), ', ')
                          FROM unnest(keys) k)) END;
    whole   text := format('jsonb_build_object(%s)', (SELECT string_agg(format('%L, penstock.watch_value(', replace(c, '%', '%%')) || penstock.watch_field_sql(watched, c) || ')', ', ')
                                                              FROM unnest(columns) c));
    shape   text := 'SELECT jsonb_build_object(''table'', ' || label || ', ''object'', %s, ''field'', %s, ''from'', %s, ''to'', %s) AS change';
    came    text := format(shape, format(object, 'n'), 'NULL', 'NULL', format(whole, 'n'));
    went    text := format(shape, format(object, 'o'), 'NULL', format(whole, 'o'), 'NULL');
    field   text := format(shape, format(object, 'n'), 'f.field', 'penstock.watch_value(f.was)',
                           'penstock.watch_value(f.became)');
    matched text[] := penstock.watch_row_columns(watched, keys);
    ranked  boolean := NOT penstock.watch_identifies(watched, matched) OR EXISTS (
        SELECT FROM pg_constraint c
         WHERE c.conrelid = watched AND c.contype = 'f'
           AND (c.confdeltype IN ('n', 'd') OR c.confupdtype IN ('c', 'n', 'd'))); -- set null, set default, cascade
    side    text := '(SELECT true AS xmin, * FROM %s_rows)';
    joined  text;
BEGIN
    IF ranked THEN
        side := format(
            '(SELECT true AS xmin, *, row_number() OVER (PARTITION BY %s ORDER BY r.cmin) AS cmax '
            'FROM (SELECT *, row_number() OVER () AS cmin FROM %%s_rows) r)',
            (SELECT string_agg(replace(format(penstock.watch_key_sql(watched, k), 'r'), '%', '%%'), ', ')
               FROM unnest(matched) k));
    END IF;
    joined := (SELECT string_agg(format(penstock.watch_key_sql(watched, k), 'n') || ' = '
                                 || format(penstock.watch_key_sql(watched, k), 'o'), ' AND ') FROM unnest(matched) k)
              || CASE WHEN ranked THEN ' AND n.cmax = o.cmax' ELSE '' END;
    RETURN CASE op
        WHEN 'insert' THEN came || ' FROM new_rows n'
        WHEN 'delete' THEN went || ' FROM old_rows o'
        WHEN 'truncate' THEN format(shape, 'NULL', 'NULL', 'NULL', 'NULL')
        ELSE format($q$SELECT c.change
  FROM %s o FULL
      JOIN %s n ON %s
 CROSS JOIN LATERAL (
       %s FROM (VALUES %s) f(field, was, became, differs) WHERE o.xmin AND n.xmin
           AND coalesce(f.differs, f.was IS DISTINCT FROM f.became)
       UNION ALL %s WHERE n.xmin IS NULL
       UNION ALL %s WHERE o.xmin IS NULL) c$q$,
            format(side, 'old'), format(side, 'new'), joined, field,
            (SELECT string_agg(format('(%L, ', c) || format(penstock.watch_field_sql(watched, c), 'o') || ', '
                               || format(penstock.watch_field_sql(watched, c), 'n') || ', '
                               || format('(%s)::boolean)', format(penstock.watch_differs_sql(watched, c))), ', ')
               FROM unnest(columns) c), went, came)
    END;
END $_$;

-- watch_types returns the names of the types that the columns of a watch have, by column: those that to_jsonb()
-- converts, which may only have types of Postgres, or domains over these, and those by which rows are joined, or an
-- operator of Postgres would be given them by a cast that any role may have made. They are names of catalog rows: a
-- text with quotation marks would depend on settings and on the version of the server.
-- Callers: make_watch_function.
CREATE OR REPLACE FUNCTION penstock.watch_types(watched regclass, columns text[], keys text[]) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_object_agg(a.attname, t.typname), '{}')
      FROM pg_attribute a JOIN pg_type t ON t.oid = penstock.watch_base_type(a.atttypid)
     WHERE a.attrelid = watched AND a.attname = ANY (columns || penstock.watch_row_columns(watched, keys))
       AND t.typnamespace = 'pg_catalog'::regnamespace
$$;

-- watch_changed_types returns the columns of a watched table whose type is one of a user and another than `types` says,
-- which are those of watch_types when the table was watched. It is inlined into the functions of triggers.
-- Callers: make_watch_function; pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.watch_changed_types(watched oid, types jsonb)
RETURNS TABLE (name name, type oid)
LANGUAGE sql STABLE AS $$
    SELECT a.attname, a.atttypid
      FROM (SELECT a.attname, a.atttypid FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
             WHERE a.attrelid = $1 AND $2 ? a.attname AND t.typnamespace <> 'pg_catalog'::regnamespace
            OFFSET 0) a -- watch_base_type is planned anew for each column that it is called for
     WHERE NOT EXISTS (SELECT FROM pg_type t WHERE t.oid = penstock.watch_base_type(a.atttypid)
                          AND t.typnamespace = 'pg_catalog'::regnamespace AND t.typname = $2 ->> a.attname)
$$;

-- make_watch_function makes the function of one trigger of a watch, or replaces it, which changes neither its owner nor
-- the trigger. The function refuses a table that is not watched, and a column whose type is another than watch_types
-- says (SQLSTATE PS006). Its comment has these types, for penstock doctor.
-- Locks: none that statements of the application wait for.
-- Callers: make_watch_function.
CREATE OR REPLACE FUNCTION penstock.make_watch_function(name text, w penstock.watch, op text) RETURNS void
LANGUAGE plpgsql AS $_$
DECLARE
    queue_name text  := (SELECT q.name FROM penstock.queue q WHERE q.id = w.queue_id);
    types      jsonb := penstock.watch_types(w.watched, w.columns, w.keys);
BEGIN
    EXECUTE format($f$CREATE OR REPLACE FUNCTION penstock.%I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
                   SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
                   SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1
                   SET lc_monetary = 'C' AS %L $f$, name, format($b$
-- Written by penstock.watch.
DECLARE
    part record;
BEGIN
    -- The row of watch is read where the OID is another one, after a restore.
    IF TG_RELID <> %s AND NOT EXISTS (SELECT FROM penstock.watch w WHERE w.watched = TG_RELID AND w.queue_id = %s)
       OR EXISTS (SELECT FROM penstock.watch_changed_types(TG_RELID, %L)) THEN
        RAISE EXCEPTION 'table %% is not what is watched, or its columns have changed', TG_RELID::regclass
            USING ERRCODE = 'PS006', HINT = 'Watch the table again, in SQL: penstock.watch.';
    END IF;
    IF current_setting('penstock.depth', true) <> '' THEN
        PERFORM penstock.check_depth(%L);
    END IF;
    FOR part IN SELECT array_agg(c.change) AS changes
                  FROM (SELECT row_number() OVER () AS n, c.change FROM (%s) c) c GROUP BY (c.n - 1) / 10000
                      ORDER BY (c.n - 1) / 10000
    LOOP
        PERFORM penstock.push_changes(%L, part.changes);
    END LOOP;
    RETURN NULL;
END $b$, w.watched::oid, w.queue_id, types, format('queue "%s" by a change of %s', queue_name, w.watched),
        penstock.watch_changes_sql(w.watched, op, w.columns, w.keys), queue_name));
    EXECUTE format('COMMENT ON FUNCTION penstock.%I() IS %L', name, types);
    EXECUTE format('REVOKE ALL ON FUNCTION penstock.%I() FROM PUBLIC', name);
END $_$;

-- watch makes changes of a table entries of a change_log queue, from its commit on: of all columns
-- but virtual generated ones, whose values no trigger has, or of some. keys are the columns that
-- identify a row; without them it is the primary key.
-- Watching again replaces the watch. The trigger functions that it makes work with any names of
-- columns. They run with the rights of the role that called watch: no other role may attach
-- them to a table, and they refuse a table that is not watched, and a column whose type has become
-- one of a user since. They work in a database that was restored from a dump, too,
-- where tables and types have other OIDs. What they record does not depend on the settings of the
-- session that changes the table: the text of a key is the lock key, and the texts of two values
-- tell whether they differ.
-- Locks: SHARE ROW EXCLUSIVE on the table, by CREATE TRIGGER: it waits for the transactions that
-- are writing to the table, and new writers wait for it. Run it when none of them is long. ACCESS
-- EXCLUSIVE where an earlier watch is replaced.
-- Callers: cmd/penstock; psql.
-- SQLSTATE: PS001 no such queue, PS002 the queue, table, columns or keys cannot be used.
CREATE OR REPLACE FUNCTION penstock.watch(
    watched regclass,
    queue   text,
    columns text[]   DEFAULT NULL,
    keys    text[]   DEFAULT NULL,
    reason  text     DEFAULT '',
    actor   text     DEFAULT NULL
) RETURNS void
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q     penstock.queue := penstock.queue_row(queue);
    op    text;
    -- No restored function has the name, as one by the OID of the table could have.
    own   text := 'watch_' || q.id || '_' || substr(gen_random_uuid()::text, 25);
    wrong text;
    made  penstock.watch;
BEGIN
    IF q.kind <> 'change_log' THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not change_log', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Create a queue of kind change_log, with grouping object (create_queue).';
    END IF;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = watched AND c.relnamespace = 'penstock'::regnamespace) THEN
        RAISE EXCEPTION 'table % is one of Penstock''s own', watched USING ERRCODE = 'PS002',
            HINT = 'Only tables of applications can be watched.';
    END IF;
    keys := coalesce(keys, (SELECT array_agg(a.attname::text ORDER BY array_position(i.indkey::int[], a.attnum::int))
                              FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
                                  AND a.attnum = ANY (i.indkey)
                             WHERE i.indrelid = watched AND i.indisprimary));
    IF coalesce(cardinality(keys), 0) = 0 THEN
        RAISE EXCEPTION 'table % has no primary key', watched USING ERRCODE = 'PS002',
            HINT = 'Say which columns identify a row: keys => ARRAY[''...''].';
    END IF;
    columns := coalesce(columns, ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = watched AND a.attnum > 0 AND NOT a.attisdropped
                                        AND a.attgenerated <> 'v' AND a.attname <> ALL (keys) ORDER BY a.attnum));
    SELECT c INTO wrong FROM unnest(columns || keys) c
     WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = watched AND a.attname = c AND a.attnum > 0
                       AND NOT a.attisdropped) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'table % has no column "%"', watched, wrong USING ERRCODE = 'PS002';
    END IF;
    SELECT a.attname INTO wrong FROM pg_attribute a
     WHERE a.attrelid = watched AND a.attname = ANY (columns || keys) AND a.attgenerated = 'v' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'column "%" of table % is a virtual generated one, whose values triggers do not see', wrong, watched
            USING ERRCODE = 'PS002', HINT = 'Watch the columns that it is computed from, or make it a stored one.';
    ELSIF cardinality(columns) = 0 THEN
        columns := keys;
    END IF;
    PERFORM penstock.unwatch(watched, queue, reason, actor);
    INSERT INTO penstock.watch (watched, queue_id, columns, keys, actor)
        VALUES (watched, q.id, columns, keys, penstock.actor_name(actor)) RETURNING * INTO made;
    FOREACH op IN ARRAY ARRAY['insert', 'update', 'delete', 'truncate'] LOOP
        PERFORM penstock.make_watch_function(own || '_' || op, made, op);
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION penstock.%I()',
                       'penstock_' || q.id || '_' || op, op, watched,
                       CASE op WHEN 'insert' THEN 'REFERENCING NEW TABLE AS new_rows'
                            WHEN 'delete' THEN 'REFERENCING OLD TABLE AS old_rows'
                               WHEN 'update' THEN 'REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows'
                                   ELSE '' END, own || '_' || op);
    END LOOP;
    PERFORM penstock.audit_log(actor, 'watch', watched::text,
                               reason, jsonb_build_object('queue', q.name, 'columns', columns, 'keys', keys));
END $_$;

-- unwatch ends the watch of a table for one queue, or for all. It drops the triggers and their
-- functions, and removes the rows and functions of watched tables that were dropped.
-- Locks: ACCESS EXCLUSIVE on the table, by DROP TRIGGER; then the rows of watch.
-- Callers: watch; psql.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.unwatch(
    watched regclass,
    queue   text     DEFAULT NULL,
    reason  text     DEFAULT '',
    actor   text     DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    w     record;
    op    text;
    ended integer := 0;
BEGIN
    FOR w IN SELECT x.watched, x.queue_id, c.oid IS NOT NULL AS there
               FROM penstock.watch x LEFT JOIN pg_class c ON c.oid = x.watched
              WHERE c.oid IS NULL OR (x.watched = unwatch.watched
                                      AND (queue IS NULL OR x.queue_id = (penstock.queue_row(queue)).id))
    LOOP
        FOREACH op IN ARRAY ARRAY['insert', 'update', 'delete', 'truncate'] LOOP
            IF w.there THEN
                EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', 'penstock_' || w.queue_id || '_' || op, w.watched);
            END IF;
        END LOOP;
        DELETE FROM penstock.watch x WHERE x.watched = w.watched AND x.queue_id = w.queue_id;
        IF w.there THEN
            PERFORM penstock.audit_log(unwatch.actor, 'unwatch', w.watched::text, unwatch.reason);
            ended := ended + 1;
        END IF;
    END LOOP;
    FOR op IN SELECT p.oid::regprocedure FROM pg_proc p
               WHERE p.pronamespace = 'penstock'::regnamespace AND p.proname ~ '^watch_[0-9]'
                 AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgfoid = p.oid)
    LOOP
        EXECUTE 'DROP FUNCTION IF EXISTS ' || op;
    END LOOP;
    RETURN ended;
END $$;

-- The functions of triggers of earlier builds compare expressions of watch_column_sql, whose quotation marks depend on
-- the version and on settings of the server. Those that the role may replace become of the present form, except where a
-- column is gone: these go on to refuse changes.
DO $$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.proname, w, o.op
               FROM penstock.watch w
               JOIN pg_trigger t ON t.tgrelid = w.watched
               JOIN unnest(ARRAY['insert', 'update', 'delete', 'truncate']) o(op)
                 ON t.tgname = 'penstock_' || w.queue_id || '_' || o.op
               JOIN pg_proc p ON p.oid = t.tgfoid
              WHERE p.pronamespace = 'penstock'::regnamespace AND p.proname ~ '^watch_[0-9]'
                AND pg_has_role(p.proowner, 'USAGE')
                AND strpos(p.prosrc, 'penstock.watch_column_sql(TG_RELID, a.attname) IS DISTINCT FROM') > 0
                AND NOT EXISTS (SELECT FROM unnest(w.columns || w.keys) c
                                  LEFT JOIN pg_attribute a ON a.attrelid = w.watched AND a.attname = c
                                                          AND NOT a.attisdropped
                                 WHERE a.attname IS NULL) LOOP
        PERFORM penstock.make_watch_function(f.proname::text, f.w, f.op);
    END LOOP;
END $$;
