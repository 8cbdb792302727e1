-- +goose Up

-- Statements make a queue one that every task node can serve: it runs the entries by SQL, in transactions that also end
-- them. What a queue may declare goes by its kind:
--
--   task, cron   run      $1 is the payload. The first column of the first row, if there is one, is the result.
--   change_log   impact   $1 is the change. Each row is a push: queue, payload, and lock_key, flow, priority, name if it has them.
--   batch        map      $1 is the items of a part, $2 the payload of its entry. The first value is the part's result.
--                reduce   $1 is the payload of the completion entry, with "batch". The first value is the batch's result.
--
-- $1 and $2 are jsonb.
ALTER TABLE penstock.queue ADD COLUMN statements jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(statements) = 'object');
COMMENT ON COLUMN penstock.queue.statements IS 'what task nodes run for its entries, with their rights; see set_statements';

-- statement_sql is a statement as it is run. The rows of an impact become one object each.
-- +goose StatementBegin
CREATE FUNCTION penstock.statement_sql(name text, statement text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE name WHEN 'impact' THEN format(E'SELECT to_jsonb(r) FROM (%s\n) r', rtrim(statement, E'; \n')) ELSE statement END
$$;
-- +goose StatementEnd

-- set_statements declares what task nodes run for the entries of a queue: {"run": "..."}; {} takes it away. It is run with
-- the rights of the task nodes, so let only those call this who have them too. Nodes know within one heartbeat.
-- +goose StatementBegin
CREATE FUNCTION penstock.set_statements(queue_name text, statements jsonb, reason text DEFAULT NULL, actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue_name);
    allowed text[] := CASE q.kind WHEN 'batch' THEN '{map,reduce}' WHEN 'change_log' THEN '{impact}' WHEN 'task' THEN '{run}' WHEN 'cron' THEN '{run}' ELSE '{}' END;
    s       record;
BEGIN
    FOR s IN SELECT * FROM jsonb_each_text(statements) LOOP
        IF s.key <> ALL (allowed) THEN
            RAISE EXCEPTION 'queue "%" of kind % has no statement "%"', q.name, q.kind, s.key
                USING ERRCODE = 'PS002', HINT = CASE WHEN allowed = '{}' THEN 'Its entries are run by what belongs to the kind.' ELSE 'It may have ' || array_to_string(allowed, ', ') || '.' END;
        END IF;
        BEGIN
            EXECUTE format('PREPARE penstock_statement (jsonb, jsonb) AS %s', penstock.statement_sql(s.key, s.value));
            DEALLOCATE penstock_statement;
        EXCEPTION WHEN OTHERS THEN
            RAISE EXCEPTION 'statement "%" of queue "%" cannot be run: %', s.key, q.name, SQLERRM
                USING ERRCODE = 'PS002', HINT = 'Write one statement; $1 (and $2, for map) are jsonb.';
        END;
    END LOOP;
    IF q.kind = 'batch' AND statements ? 'reduce' AND NOT statements ? 'map' THEN
        RAISE EXCEPTION 'queue "%" has a reduce and no map', q.name USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.queue x SET statements = set_statements.statements, version = version + 1 WHERE x.id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_statements.actor, current_user), 'set_statements', queue_name, set_statements.reason, statements);
END $$;
-- +goose StatementEnd
