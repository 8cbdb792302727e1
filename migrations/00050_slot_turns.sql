-- +goose Up

-- Slots between nodes: whoever has none comes before whoever has some, and those who went without longest come first.
ALTER TABLE penstock.slot_demand ADD COLUMN since timestamptz NOT NULL DEFAULT clock_timestamp();
COMMENT ON COLUMN penstock.slot_demand.since IS 'since when the node goes without; wanted_at is when it last asked, and 3 s later it is taken to have no more use for a slot';

-- hungry_nodes are the living nodes that asked for slots of a model just now and got none, with what they hold already.
-- +goose StatementBegin
CREATE FUNCTION penstock.hungry_nodes(wanted text) RETURNS TABLE (node_id bigint, since timestamptz, held bigint)
LANGUAGE sql STABLE AS $$
    SELECT d.node_id, d.since,
           (SELECT count(*) FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
             WHERE i.model = wanted AND s.node_id = d.node_id AND s.doubt_at IS NULL)
      FROM penstock.slot_demand d
     WHERE d.model = wanted AND d.wanted_at > clock_timestamp() - interval '3 seconds' AND penstock.node_lives(d.node_id)
$$;
-- +goose StatementEnd

-- slot_share says how many slots of a model a node may hold while other nodes have to go without: an equal part for
-- everybody who holds some or wants some. Where there are fewer slots than nodes they take turns of 5 s: a node whose
-- turn is over may hold none. Null: nobody goes without.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.slot_share(wanted text, node bigint) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN slots >= nodes THEN ceil(slots::numeric / nodes)::integer
                WHEN (SELECT min(s.leased_at) FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
                       WHERE i.model = wanted AND s.node_id = node AND s.doubt_at IS NULL) < clock_timestamp() - interval '5 seconds' THEN 0
                ELSE 1 END
      FROM (SELECT coalesce(sum(i.slots), 0) AS slots FROM penstock.instance i WHERE i.model = wanted AND penstock.usable(i)) a,
           (SELECT count(*) AS nodes FROM (
                SELECT h.node_id FROM penstock.hungry_nodes(wanted) h
                 UNION SELECT s.node_id FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
                        WHERE i.model = wanted AND s.doubt_at IS NULL AND penstock.node_lives(s.node_id)
                 UNION SELECT node) everybody) b
     WHERE EXISTS (SELECT FROM penstock.hungry_nodes(wanted) h WHERE h.node_id <> node)
$$;
-- +goose StatementEnd

-- lease_slots gives a node up to want free slots of a model, spread over its instances, least held first. It waits for
-- nobody: an instance that somebody else is leasing from just now is passed by. Locking the instance before counting
-- is what keeps the sum within slots: where an instance shrank, numbers alone would not.
--
-- While others go without it leaves one for each of those whose turn is before this node's.
--
-- Nobody frees a slot before its node's lease has lapsed: the node may use what it got for valid_ms from when it asked.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.lease_slots(wanted text, node bigint, want integer)
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, valid_ms bigint)
LANGUAGE plpgsql AS $$
DECLARE
    i      record;
    most   integer;
    share  integer := penstock.slot_share(wanted, node);
    mine   bigint;
    left_  integer := want;
    got    integer;
    millis bigint;
BEGIN
    SELECT floor(extract(epoch FROM n.beat_at + n.lease - clock_timestamp()) * 1000) INTO millis
      FROM penstock.node n WHERE n.id = node AND n.draining_at IS NULL;
    IF millis IS NULL OR millis <= 0 THEN
        RETURN;
    END IF;
    IF share IS NOT NULL THEN
        SELECT count(*) INTO mine FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
         WHERE x.model = wanted AND s.node_id = node;
        SELECT least(left_, share - mine, f.free - t.before) INTO left_
          FROM (SELECT coalesce(sum(greatest(x.slots - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = x.id), 0)), 0) AS free
                  FROM penstock.instance x WHERE x.model = wanted AND penstock.usable(x)) f,
               (SELECT count(*) AS before FROM penstock.hungry_nodes(wanted) h
                 WHERE h.node_id <> node AND h.held = 0
                   AND (mine > 0 OR h.since < coalesce((SELECT own.since FROM penstock.hungry_nodes(wanted) own WHERE own.node_id = node), 'infinity'))) t;
    END IF;
    want := greatest(left_, 0);
    left_ := want;
    FOR i IN SELECT x.id, count(*) OVER () - row_number() OVER (ORDER BY h.held::real / x.slots, x.id) + 1 AS behind
               FROM penstock.instance x
              CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.slot s WHERE s.instance_id = x.id) h
              WHERE x.model = wanted AND penstock.usable(x) AND h.held < x.slots
              ORDER BY h.held::real / x.slots, x.id
    LOOP
        EXIT WHEN left_ <= 0;
        SELECT x.slots INTO most FROM penstock.instance x
         WHERE x.id = i.id AND penstock.usable(x) FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        RETURN QUERY
        INSERT INTO penstock.slot (instance_id, number, token, node_id)
        SELECT i.id, n.number, nextval('penstock.token_seq'), node
          FROM (SELECT g.number FROM generate_series(0, most - 1) g(number)
                 WHERE NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = i.id AND s.number = g.number)
                 ORDER BY g.number
                 LIMIT greatest(0, least(ceil(left_::real / i.behind)::bigint,
                                         most - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = i.id)))) n
        ON CONFLICT DO NOTHING
        RETURNING slot.instance_id, slot.number, slot.token, millis;
        GET DIAGNOSTICS got = ROW_COUNT;
        left_ := left_ - got;
    END LOOP;
    IF left_ = want THEN
        INSERT INTO penstock.slot_demand AS d (model, node_id) VALUES (wanted, node)
        ON CONFLICT (model, node_id) DO UPDATE
           SET wanted_at = clock_timestamp(),
               since = CASE WHEN d.wanted_at > clock_timestamp() - interval '3 seconds' THEN d.since ELSE clock_timestamp() END;
    ELSE
        DELETE FROM penstock.slot_demand d WHERE d.model = wanted AND d.node_id = node;
    END IF;
END $$;
-- +goose StatementEnd

CREATE VIEW penstock.slot_contention AS
SELECT m.name AS model, k.node_id, n.name AS node, count(s.node_id) AS held, h.since AS wants_more_since,
       penstock.slot_share(m.name, k.node_id) AS share
  FROM penstock.model m
 CROSS JOIN LATERAL (
       SELECT s.node_id FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id WHERE i.model = m.name
        UNION SELECT x.node_id FROM penstock.hungry_nodes(m.name) x) k
  LEFT JOIN penstock.node n ON n.id = k.node_id
  LEFT JOIN penstock.hungry_nodes(m.name) h ON h.node_id = k.node_id
  LEFT JOIN (SELECT i.model, s.node_id FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id) s
         ON s.model = m.name AND s.node_id = k.node_id
 GROUP BY m.name, k.node_id, n.name, h.since;
COMMENT ON VIEW penstock.slot_contention IS 'who holds slots of a model and who wants more; share is what each may hold while somebody else goes without';
