-- +goose Up

-- What flows have used, and what share each is to have. pkg/fairness says how the two make an order.

-- Service over all nodes in slot-seconds or declared cost, as of a time; half of it is forgotten every half-life. Nodes fold
-- into it what they gave, all their flows in one statement every second or two; no push and no claim touches it. A row
-- without flow that is whole counts a queue's band among the queues.
CREATE TABLE penstock.usage (
    service  double precision NOT NULL,
    lift     double precision NOT NULL,
    at       timestamptz NOT NULL,
    queue_id integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    priority smallint NOT NULL,
    whole    boolean NOT NULL,
    flow     text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue_id, priority, whole, flow)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
COMMENT ON COLUMN penstock.usage.service IS 'slot-seconds, or cost where entries declare it, with what is forgotten left out';
COMMENT ON COLUMN penstock.usage.lift IS 'never given: what brought a flow that was away to the level of those that stayed';

-- usage_left is what remains at present of an amount as of a time. Beyond 200 half-lives it is as good as nothing.
CREATE FUNCTION penstock.usage_left(amount double precision, at timestamptz, half_life double precision DEFAULT 300) RETURNS double precision
LANGUAGE sql VOLATILE AS $$
    SELECT amount * power(0.5::float8, least(200, greatest(0, extract(epoch FROM clock_timestamp() - at)::float8 / half_life)))
$$;

-- A flow's share beside other flows, in one queue or, without one, in all; 1 where there is no row.
CREATE TABLE penstock.flow_weight (
    queue_id integer REFERENCES penstock.queue ON DELETE CASCADE,
    weight   real NOT NULL CHECK (weight >= 0.001 AND weight <= 1000),
    flow     text COLLATE "C" NOT NULL
);
CREATE UNIQUE INDEX flow_weight_of ON penstock.flow_weight (flow, coalesce(queue_id, 0));

-- set_flow_weight gives a flow a share beside other flows, in one queue or in all; a null weight takes it away.
-- +goose StatementBegin
CREATE FUNCTION penstock.set_flow_weight(flow text, weight real, queue text DEFAULT NULL, reason text DEFAULT '',
                                         actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    IF set_flow_weight.weight IS NULL THEN
        DELETE FROM penstock.flow_weight w WHERE w.flow = set_flow_weight.flow AND w.queue_id IS NOT DISTINCT FROM q;
    ELSE
        INSERT INTO penstock.flow_weight AS w (flow, queue_id, weight) VALUES (set_flow_weight.flow, q, set_flow_weight.weight)
        ON CONFLICT (flow, coalesce(queue_id, 0)) DO UPDATE SET weight = excluded.weight;
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_flow_weight.actor, current_user), 'set_flow_weight', 'flow ' || set_flow_weight.flow, set_flow_weight.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue, 'weight', set_flow_weight.weight)));
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'weight of flow "%" is not valid: %', set_flow_weight.flow, set_flow_weight.weight
        USING ERRCODE = 'PS002', HINT = 'Give a number from 0.001 to 1000; 1 is what every other flow has.';
END $$;
-- +goose StatementEnd

-- queue_weights are the flows of a queue whose weight is not 1: {"flow": weight}. The queue's own go before those of all queues.
CREATE FUNCTION penstock.queue_weights(q penstock.queue) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_object_agg(w.flow, w.weight ORDER BY w.queue_id NULLS FIRST), '{}')
      FROM penstock.flow_weight w WHERE w.queue_id IS NULL OR w.queue_id = q.id
$$;

-- usage_status shows what each flow uses: slots are its slot-seconds a second of late, the last minutes counting most,
-- share is its part of its application's.
CREATE VIEW penstock.usage_status AS
SELECT u.queue, u.application, u.flow, u.slots, u.slots / nullif(sum(u.slots) OVER (PARTITION BY u.application), 0) AS share,
       coalesce((penstock.queue_weights(q)->>u.flow)::real, 1) AS weight, q.priority AS queue_weight, q.algorithm, u.at
  FROM (SELECT q.id, q.name AS queue, q.application, x.flow, max(x.at) AS at,
               sum(greatest(0, penstock.usage_left(x.service, x.at))) * ln(2::float8) / 300 AS slots
          FROM penstock.queue q JOIN penstock.usage x ON x.queue_id = q.id
         WHERE NOT x.whole
         GROUP BY q.id, q.name, q.application, x.flow) u
  JOIN penstock.queue q ON q.id = u.id;
