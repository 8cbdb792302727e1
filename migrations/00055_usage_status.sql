-- +goose Up

-- The weight of each flow is looked up: with many weights, a list of them all for each row was dear.
CREATE OR REPLACE VIEW penstock.usage_status AS
SELECT u.queue, u.application, u.flow, u.slots, u.slots / nullif(sum(u.slots) OVER (PARTITION BY u.application), 0) AS share,
       coalesce((SELECT w.weight FROM penstock.flow_weight w
                  WHERE w.flow = u.flow AND coalesce(w.queue_id, 0) IN (0, u.id) ORDER BY w.queue_id NULLS LAST LIMIT 1), 1) AS weight,
       u.priority AS queue_weight, u.algorithm, u.at
  FROM (SELECT q.id, q.name AS queue, q.application, q.priority, q.algorithm, x.flow, max(x.at) AS at,
               sum(greatest(0, penstock.usage_left(x.service, x.at))) * ln(2::float8) / 300 AS slots
          FROM penstock.queue q JOIN penstock.usage x ON x.queue_id = q.id
         WHERE NOT x.whole
         GROUP BY q.id, q.name, q.application, q.priority, q.algorithm, x.flow) u;
