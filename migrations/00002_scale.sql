-- +goose Up

-- Autoscaling: deployments, the windows of the decisions, the decisions, and the switches. Rules and reasons: pkg/scale/doc.go.

-- A kind of instances of a model that something outside starts and stops: it reads scale_state (advise), or KEDA asks
-- scale_metric.
CREATE TABLE penstock.deployment (
    name           text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$'),
    model          text COLLATE "C" NOT NULL REFERENCES penstock.model,
    backend        text NOT NULL DEFAULT 'advise' CHECK (backend IN ('advise', 'keda')),
    target         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(target) = 'object'),
    policy         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(policy) = 'object'),
    template       jsonb CHECK (jsonb_typeof(template) = 'object'),
    template_hash  text GENERATED ALWAYS AS (md5(template::text)) STORED,
    cost           double precision NOT NULL DEFAULT 1 CHECK (cost >= 0),
    fill_order     integer NOT NULL DEFAULT 0,
    mode           text NOT NULL DEFAULT 'full' CHECK (mode IN ('disabled', 'manual', 'up-only', 'full', 'advise')),
    override       integer CHECK (override BETWEEN 0 AND 1400),
    override_until timestamptz,
    override_by    text,
    on_demand      boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now(),
    changed_at     timestamptz NOT NULL DEFAULT now(),
    CHECK ((override IS NULL) = (override_until IS NULL))
);
CREATE INDEX deployment_model ON penstock.deployment (model, fill_order, cost, name);
COMMENT ON COLUMN penstock.deployment.cost IS 'of an instance an hour, in any unit';
COMMENT ON COLUMN penstock.deployment.fill_order IS 'deployments of a model are filled in this order, then by cost';

-- The history of a model that the next decision needs. It outlives a leader: the next one goes on with the same windows.
CREATE TABLE penstock.scale_state (
    model      text COLLATE "C" PRIMARY KEY REFERENCES penstock.model ON DELETE CASCADE,
    state      jsonb NOT NULL,
    arrived    bigint NOT NULL,
    desired    integer NOT NULL,
    base       integer NOT NULL,
    raw        integer NOT NULL,
    stabilised integer NOT NULL,
    ready      integer NOT NULL,
    metric     double precision NOT NULL,
    why        text NOT NULL,
    decided_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
COMMENT ON COLUMN penstock.scale_state.arrived IS 'rows that were ever inserted into the queues of the model, as of the decision';

-- What changed, and why. Dropped by the day, see penstock.retention.
CREATE TABLE penstock.scale_decision (
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    model      text COLLATE "C" NOT NULL,
    before     integer NOT NULL,
    desired    integer NOT NULL,
    base       integer NOT NULL,
    raw        integer NOT NULL,
    stabilised integer NOT NULL,
    ready      integer NOT NULL,
    applied    boolean NOT NULL,
    notes      jsonb NOT NULL,
    why        text NOT NULL,
    PRIMARY KEY (model, at)
) PARTITION BY RANGE (at);
CREATE INDEX scale_decision_at ON penstock.scale_decision (at, model);
CREATE TABLE penstock.scale_decision_default PARTITION OF penstock.scale_decision DEFAULT;

-- Switches that hold at once on all leaders.
CREATE TABLE penstock.setting (
    name       text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_.]{0,99}$'),
    value      jsonb NOT NULL,
    actor      text NOT NULL,
    reason     text NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.setting.name IS 'scale.off, scale.zero_off (booleans), scale.max_all (a number)';
