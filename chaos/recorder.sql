-- The third recorder: what the database holds. Triggers write in the transactions that they record, so that what is rolled
-- back leaves no row. Names are qualified, since sessions of the product look names up in pg_catalog alone.
CREATE SCHEMA judge;
CREATE TABLE judge.event (
    seq      bigint GENERATED ALWAYS AS IDENTITY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    began    timestamptz NOT NULL DEFAULT transaction_timestamp(),
    tx       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    what     text NOT NULL,
    queue_id int,
    entry_id bigint,
    key      text,
    token    bigint,
    last     bigint,
    node     bigint,
    op       bigint,
    attempt  int,
    crashes  int,
    outcome  text,
    nonce    text,
    class    text,
    due      timestamptz,
    under    bigint, -- the token of the lock that covered an entry when an error of it was recorded
    holder   bigint, -- the node of that lock
    noted    bigint  -- the node of the run, by the note in the history of the entry; null where none was added
);
CREATE TABLE judge.effect (op bigint NOT NULL);
CREATE TABLE judge.part (b bigint NOT NULL, i int NOT NULL);
CREATE TABLE judge.tick (job text NOT NULL, nominal timestamptz NOT NULL);
CREATE TABLE judge.client_row (op bigint PRIMARY KEY);

-- lock_of returns the lock record that covers an entry. An ending is recorded before its lock record is deleted.
CREATE FUNCTION judge.lock_of(queue integer, entry bigint, entry_key text, OUT token bigint, OUT node bigint)
LANGUAGE sql STABLE AS $$
    SELECT l.token, l.node_id FROM penstock.lock l
     WHERE l.queue_id = $1 AND l.lock_key = coalesce($3, '#' || $2) AND l.last_entry_id >= $2
$$;
CREATE FUNCTION judge.on_entry() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO judge.event (what, queue_id, entry_id, key, op, due)
        VALUES ('entry', NEW.queue_id, NEW.id, NEW.lock_key,
                CASE WHEN jsonb_typeof(NEW.payload) = 'object' THEN (NEW.payload->>'op')::bigint END,
                CASE WHEN NEW.status = 'initial' THEN NEW.due_at END);
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO judge.event (what, queue_id, entry_id, key, due, class, under, holder, noted)
        SELECT 'later', NEW.queue_id, NEW.id, NEW.lock_key, NEW.due_at, n.note->>'class', l.token, l.node,
               (n.note->>'node')::bigint
          FROM (SELECT CASE WHEN NEW.attempt > OLD.attempt THEN NEW.history->-1 END AS note) n
         CROSS JOIN judge.lock_of(NEW.queue_id, NEW.id, NEW.lock_key) l;
    ELSE
        INSERT INTO judge.event (what, queue_id, entry_id, key, attempt, crashes)
        VALUES ('gone', OLD.queue_id, OLD.id, OLD.lock_key, OLD.attempt, OLD.crashes);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.event (what, queue_id, entry_id, last, due)
    VALUES ('ready', NEW.queue_id, NEW.entry_id, NEW.pos, NEW.not_before);
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_lock() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO judge.event (what, queue_id, key, token, last, node)
        VALUES ('grant', NEW.queue_id, NEW.lock_key, NEW.token, NEW.last_entry_id, NEW.node_id);
    ELSE
        INSERT INTO judge.event (what, queue_id, key, token) VALUES ('free', OLD.queue_id, OLD.lock_key, OLD.token);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_result() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.event (what, queue_id, entry_id, token, outcome, attempt, nonce)
    VALUES ('end', NEW.queue_id, NEW.entry_id, NEW.token, NEW.outcome::text, NEW.attempt,
            CASE WHEN jsonb_typeof(NEW.result) = 'object' THEN NEW.result->>'nonce' END);
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_failure() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.event (what, queue_id, entry_id, outcome, attempt, crashes, class, under, holder, noted)
    SELECT 'end', NEW.queue_id, NEW.entry_id, 'failed', NEW.attempt, NEW.crashes, NEW.class, l.token, l.node,
           CASE WHEN n.note->>'error' = NEW.error OR NEW.class = 'poison' THEN (n.note->>'node')::bigint END
      FROM (SELECT NEW.history->-1 AS note) n
     CROSS JOIN judge.lock_of(NEW.queue_id, NEW.entry_id, NEW.lock_key) l;
    RETURN NULL;
END $$;
-- on_change records that a row was changed in place, which the product never does: the end of an entry is one row that
-- stays, and a lock record is inserted and deleted.
CREATE FUNCTION judge.on_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_ARGV[0] = 'lock' THEN
        INSERT INTO judge.event (what, class, queue_id, key, token)
        VALUES ('changed', 'lock', NEW.queue_id, NEW.lock_key, NEW.token);
    ELSE
        INSERT INTO judge.event (what, class, queue_id, entry_id)
        VALUES ('changed', TG_ARGV[0], NEW.queue_id, NEW.entry_id);
    END IF;
    RETURN NULL;
END $$;
-- on_doubt records since when and until when a slot is in doubt: until it is freed, or adopted under a new token.
CREATE FUNCTION judge.on_doubt() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' OR NEW.doubt_at IS NULL THEN
        INSERT INTO judge.event (what, token) VALUES ('certain', OLD.token);
    ELSIF OLD.doubt_at IS NULL THEN
        INSERT INTO judge.event (what, token, key, entry_id, class)
        VALUES ('doubt', NEW.token, NEW.instance_id || '/' || NEW.number, NEW.entry_id, NEW.doubt);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_node() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.event (what, node, key) VALUES ('node', NEW.id, NEW.name);
    RETURN NULL;
END $$;
CREATE FUNCTION judge.on_leader() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.event (what, token, last, class)
    VALUES ('term', NEW.term, extract(epoch FROM NEW.lease) * 1000,
            CASE WHEN NEW.renewed_at IS NULL THEN 'resigned' ELSE 'renewed' END);
    RETURN NULL;
END $$;
CREATE TRIGGER judge AFTER UPDATE ON penstock.leader FOR EACH ROW EXECUTE FUNCTION judge.on_leader();
CREATE TRIGGER judge AFTER INSERT OR DELETE ON penstock.entry FOR EACH ROW EXECUTE FUNCTION judge.on_entry();
CREATE TRIGGER judge_later AFTER UPDATE ON penstock.entry FOR EACH ROW
    WHEN (NEW.status = 'initial' AND OLD.status <> 'initial') EXECUTE FUNCTION judge.on_entry();
CREATE TRIGGER judge AFTER INSERT ON penstock.ready FOR EACH ROW
    WHEN (NEW.entry_id IS NOT NULL) EXECUTE FUNCTION judge.on_ready();
CREATE TRIGGER judge AFTER INSERT OR DELETE ON penstock.lock FOR EACH ROW EXECUTE FUNCTION judge.on_lock();
CREATE TRIGGER judge AFTER INSERT ON penstock.result FOR EACH ROW EXECUTE FUNCTION judge.on_result();
CREATE TRIGGER judge AFTER INSERT ON penstock.failure FOR EACH ROW EXECUTE FUNCTION judge.on_failure();
CREATE TRIGGER judge_change AFTER UPDATE ON penstock.lock FOR EACH ROW EXECUTE FUNCTION judge.on_change('lock');
CREATE TRIGGER judge_change AFTER UPDATE ON penstock.result FOR EACH ROW EXECUTE FUNCTION judge.on_change('result');
CREATE TRIGGER judge_change AFTER UPDATE ON penstock.failure FOR EACH ROW EXECUTE FUNCTION judge.on_change('failure');
CREATE TRIGGER judge AFTER UPDATE ON penstock.slot FOR EACH ROW
    WHEN (OLD.doubt_at IS DISTINCT FROM NEW.doubt_at) EXECUTE FUNCTION judge.on_doubt();
CREATE TRIGGER judge_gone AFTER DELETE ON penstock.slot FOR EACH ROW
    WHEN (OLD.doubt_at IS NOT NULL) EXECUTE FUNCTION judge.on_doubt();
CREATE TRIGGER judge AFTER INSERT ON penstock.node FOR EACH ROW EXECUTE FUNCTION judge.on_node();
-- Nodes that registered before the triggers were there; none registers until this transaction ends.
INSERT INTO judge.event (what, node, key) SELECT 'node', id, name FROM penstock.node;
