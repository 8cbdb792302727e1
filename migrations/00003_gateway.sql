-- +goose Up

-- The online gateway: settings, preemption of durable entries, and what is folded once. Rules and their reasons:
-- pkg/gateway/doc.go.

-- A gateway is a node without threads. It holds slots, and is no peer of task nodes: not in the fairness of nodes, not in
-- the number of nodes that serve a queue, and not in the decision to suspend recovery.
ALTER TABLE penstock.node ADD COLUMN kind text NOT NULL DEFAULT 'task' CHECK (kind IN ('task', 'gateway'));
COMMENT ON COLUMN penstock.node.kind IS 'task: claims entries; gateway: serves online requests';

-- How many slots a node misses, so that whoever hands over idle ones knows how many.
ALTER TABLE penstock.slot_demand ADD COLUMN missing integer NOT NULL DEFAULT 1;

-- Settings of pools, and of flows over all pools. Not fields of model.config: older nodes refuse those that they do not know.
CREATE TABLE penstock.gateway_policy (
    model      text COLLATE "C" PRIMARY KEY REFERENCES penstock.model ON DELETE CASCADE,
    config     jsonb NOT NULL CHECK (jsonb_typeof(config) = 'object'),
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.gateway_policy.config IS 'fields laid over the defaults; docs/gateway.md lists them';

CREATE TABLE penstock.flow_criticality (
    flow        text COLLATE "C" PRIMARY KEY,
    criticality text NOT NULL CHECK (criticality IN ('critical', 'default', 'sheddable')),
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.flow_criticality.criticality IS 'of requests that name none, and the highest that they may name';

-- Limits of a token at gateways, by its name, so that they outlive a rotation. A token without a row may use every model.
CREATE TABLE penstock.gateway_token (
    name        text COLLATE "C" PRIMARY KEY,
    models      text[] NOT NULL DEFAULT '{}',
    criticality text NOT NULL DEFAULT 'critical' CHECK (criticality IN ('critical', 'default', 'sheddable')),
    rate        real NOT NULL DEFAULT 0 CHECK (rate >= 0),
    in_flight   integer NOT NULL DEFAULT 0 CHECK (in_flight >= 0),
    waiting     integer NOT NULL DEFAULT 0 CHECK (waiting >= 0)
);
COMMENT ON COLUMN penstock.gateway_token.models IS 'that it may use; empty: all';
COMMENT ON COLUMN penstock.gateway_token.rate IS 'requests a second; 0: not limited';

ALTER TABLE penstock.api_token DROP CONSTRAINT IF EXISTS api_token_scopes_check, DROP CONSTRAINT IF EXISTS api_token_push_limits;
ALTER TABLE penstock.api_token
    ADD CONSTRAINT api_token_scopes_check
        CHECK (cardinality(scopes) > 0 AND scopes <@ ARRAY['push', 'read', 'operate', 'admin', 'call']),
    ADD CONSTRAINT api_token_push_limits
        CHECK (scopes <@ ARRAY['push', 'read', 'call'] OR (flows = '{}' AND priority_max IS NULL AND rate IS NULL));

-- Orders to end the run of a durable entry so that its slot serves online requests. A row stays until its entry has ended: it
-- counts how often the entry was preempted.
CREATE TABLE penstock.preemption (
    entry_id   bigint NOT NULL,
    token      bigint NOT NULL,
    node_id    bigint NOT NULL,
    gateway_id bigint NOT NULL,
    ordered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at   timestamptz,
    queue_id   integer NOT NULL,
    times      integer NOT NULL DEFAULT 1,
    PRIMARY KEY (queue_id, entry_id)
) WITH (fillfactor = 70);
CREATE INDEX preemption_order ON penstock.preemption (node_id) WHERE taken_at IS NULL;
COMMENT ON COLUMN penstock.preemption.node_id IS 'that runs the entry; it sets taken_at when it has read the order';

-- The last fold of use of each gateway: a fold whose answer was lost is sent again, and counts once.
CREATE TABLE penstock.gateway_fold (
    node_id bigint PRIMARY KEY,
    seq     bigint NOT NULL,
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
