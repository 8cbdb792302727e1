-- Statements that task nodes run for the entries of a queue.
--
-- Statements make a queue one that every task node can serve: it runs the entries by SQL, in transactions that also end
-- them. What a queue may declare goes by its kind:
--
--   task, cron   run      $1 is the payload. The first column of the first row, if there is one, is the result.
--   change_log   impact   $1 is the change. Each row is a push: queue, payload, and lock_key, flow, priority, name if it has them.
--   batch        map      $1 is the items of a part, $2 the payload of its entry. The first value is the part's result.
--                reduce   $1 is the payload of the completion entry, with "batch". The first value is the batch's result.
--
-- $1 and $2 are jsonb.

-- statement_sql is the text of a statement as a node runs it. The rows of an impact become one
-- object each.
-- Callers: set_statements; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.statement_sql(name text, statement text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE name WHEN 'impact' THEN format(E'SELECT to_jsonb(r) FROM (%s\n) r', rtrim(statement, E'; \n'))
        ELSE statement END
$$;

-- check_statement refuses a text that is not one statement. The text is parsed as the body of a
-- temporary function, and not executed.
-- Locks: none of tables but those of parsing.
-- Callers: check_query, set_statements.
-- SQLSTATE: those of the parser (42601 and others), which the callers turn into PS002.
CREATE OR REPLACE FUNCTION penstock.check_statement(statement text) RETURNS void
LANGUAGE plpgsql SET check_function_bodies = on AS $$
DECLARE
    body text;
BEGIN
    -- Nothing of the text is executed: it is a literal here, the body of a function that is parsed and never called.
    -- COPY takes in parentheses one SELECT, INSERT, UPDATE, DELETE or MERGE; that form goes no further than the
    -- grammar. The other one resolves names and types. A text that closes the parenthesis itself fails there.
    FOREACH body IN ARRAY ARRAY[format(E'COPY (%s\n) TO STDOUT', rtrim(statement, E'; \t\r\n')), statement] LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION pg_temp.penstock_statement(jsonb, jsonb) RETURNS void LANGUAGE sql AS %L', body);
    END LOOP;
    DROP FUNCTION pg_temp.penstock_statement(jsonb, jsonb);
END $$;

-- set_statements declares the statements that task nodes run for the entries of a queue: {"run":
-- "..."}; {} removes them. They run with the rights of the task nodes, so grant this function only
-- to roles that have those rights. Nodes read them within one heartbeat.
-- Locks: the row of the queue.
-- Callers: cmd/tasknode, pkg/invalidation; psql.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.set_statements(
    queue_name text,
    statements jsonb,
    reason     text  DEFAULT NULL,
    actor      text  DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue_name);
    allowed text[] := CASE q.kind WHEN 'batch' THEN '{map,reduce}' WHEN 'change_log' THEN '{impact}'
        WHEN 'task' THEN '{run}' WHEN 'cron' THEN '{run}' ELSE '{}' END;
    s       record;
BEGIN
    FOR s IN SELECT * FROM jsonb_each_text(statements) LOOP
        IF s.key <> ALL (allowed) THEN
            RAISE EXCEPTION 'queue "%" of kind % has no statement "%"', q.name, q.kind, s.key
                USING ERRCODE = 'PS002', HINT = CASE
                    WHEN allowed = '{}' THEN 'Its entries are run by what belongs to the kind.'
                    ELSE 'It may have ' || array_to_string(allowed, ', ') || '.' END;
        END IF;
        BEGIN
            PERFORM penstock.check_statement(penstock.statement_sql(s.key, s.value));
        EXCEPTION WHEN OTHERS THEN
            RAISE EXCEPTION 'statement "%" of queue "%" cannot be run: %', s.key, q.name, SQLERRM
                USING ERRCODE = 'PS002', HINT = 'Write one statement; $1 (and $2, for map) are jsonb.';
        END;
    END LOOP;
    IF q.kind = 'batch' AND statements ? 'reduce' AND NOT statements ? 'map' THEN
        RAISE EXCEPTION 'queue "%" has a reduce and no map', q.name USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.queue x SET statements = set_statements.statements, version = version + 1 WHERE x.id = q.id;
    PERFORM penstock.audit_log(set_statements.actor, 'set_statements', queue_name, set_statements.reason, statements);
END $$;
