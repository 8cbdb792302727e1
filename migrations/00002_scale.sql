-- +goose Up

-- Autoscaling: deployments, the windows of the decisions, the decisions, and the switches. Rules and reasons: pkg/scale/doc.go.

-- A kind of instances of a model. The elected leader starts and stops them through a backend (local, webhook, kubernetes), or
-- something outside does: it reads scale_state (advise), or KEDA asks scale_metric or the leader (keda).
CREATE TABLE penstock.deployment (
    name           text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$'),
    model          text COLLATE "C" NOT NULL REFERENCES penstock.model,
    backend        text NOT NULL DEFAULT 'advise' CHECK (backend IN ('advise', 'keda', 'local', 'webhook', 'kubernetes')),
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

-- What the first request of a model without a deployment makes one from.
CREATE TABLE penstock.deployment_template (
    model      text COLLATE "C" PRIMARY KEY REFERENCES penstock.model ON DELETE CASCADE,
    backend    text NOT NULL CHECK (backend IN ('advise', 'keda', 'local', 'webhook', 'kubernetes')),
    target     jsonb NOT NULL CHECK (jsonb_typeof(target) = 'object'),
    policy     jsonb NOT NULL CHECK (jsonb_typeof(policy) = 'object'),
    template   jsonb CHECK (jsonb_typeof(template) = 'object'),
    cost       double precision NOT NULL CHECK (cost >= 0),
    fill_order integer NOT NULL,
    idle       interval NOT NULL CHECK (idle BETWEEN interval '1 minute' AND interval '1 year'),
    changed_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.deployment_template.idle IS 'a deployment that was made from it goes when it has no instance and the last request is older';

-- What the backend of a deployment was told, and what it answered. An order is written before the backend gets it: a new leader
-- gives the same order again.
CREATE TABLE penstock.deployment_state (
    name           text COLLATE "C" PRIMARY KEY REFERENCES penstock.deployment ON DELETE CASCADE,
    desired        integer NOT NULL DEFAULT 0,
    decided_at     timestamptz,
    order_id       bigint NOT NULL DEFAULT 0,
    ordered        integer NOT NULL DEFAULT 0,
    ordered_at     timestamptz,
    applied_id     bigint NOT NULL DEFAULT 0,
    applied_at     timestamptz,
    existing       integer,
    starting       timestamptz[] NOT NULL DEFAULT '{}',
    seen_at        timestamptz,
    replace_before timestamptz,
    failures       integer NOT NULL DEFAULT 0,
    failed_at      timestamptz,
    retry_at       timestamptz,
    error          text,
    no_room_at     timestamptz,
    place          text,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.deployment_state.desired IS 'its share of the instances of the model';
COMMENT ON COLUMN penstock.deployment_state.decided_at IS 'when desired was set; null: nothing is started or stopped yet';
COMMENT ON COLUMN penstock.deployment_state.ordered IS 'instances that are to exist: those desired, and those that drain';
COMMENT ON COLUMN penstock.deployment_state.ordered_at IS 'when ordered last grew: a start that did not come since is dated from it';
COMMENT ON COLUMN penstock.deployment_state.existing IS 'instances that the backend reported at seen_at; null where it never did';
COMMENT ON COLUMN penstock.deployment_state.starting IS 'when starts began that are not registered as instances yet';
COMMENT ON COLUMN penstock.deployment_state.replace_before IS 'starts that began earlier and are not ready are stuck, and are removed';
COMMENT ON COLUMN penstock.deployment_state.failures IS 'starts or orders in a row that failed; 3 block the deployment until retry_at';
COMMENT ON COLUMN penstock.deployment_state.no_room_at IS 'when its backend last had no room for one more instance';
COMMENT ON COLUMN penstock.deployment_state.place IS 'machine and directory of the instances, where its backend is bound to one';

-- Instances that register themselves, or that a backend has started.
ALTER TABLE penstock.instance
    ADD COLUMN deployment text COLLATE "C",
    ADD COLUMN template_hash text,
    ADD COLUMN expires_at timestamptz,
    ADD COLUMN ready_at timestamptz;
CREATE INDEX instance_deployment ON penstock.instance (deployment) WHERE deployment IS NOT NULL;
CREATE INDEX instance_expires ON penstock.instance (expires_at) WHERE expires_at IS NOT NULL;
COMMENT ON COLUMN penstock.instance.deployment IS 'that started it; null where a person or another system did';
COMMENT ON COLUMN penstock.instance.expires_at IS 'of one that registered itself: it takes no calls after that unless it registers again';
COMMENT ON COLUMN penstock.instance.ready_at IS 'of one of a deployment: the first probe that found it ready';

-- The queues of a model, for decisions.
CREATE INDEX queue_model ON penstock.queue (model COLLATE "C") WHERE model IS NOT NULL;

-- How long starts took, for the percentiles that decisions use.
CREATE TABLE penstock.cold_start (
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    model   text COLLATE "C" NOT NULL,
    server  text COLLATE "C" NOT NULL,
    seconds double precision NOT NULL,
    PRIMARY KEY (model, at, server)
);

-- Online calls of a model that ended, and requests that gateways refused, since the row was made.
CREATE TABLE penstock.model_online (
    model   text COLLATE "C" PRIMARY KEY,
    calls   bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- What a model did in a minute, and what was decided. Sums: arrived to cold_seconds; maxima: the rest. Dropped by the day, see
-- penstock.retention.
CREATE TABLE penstock.model_minute (
    minute       timestamptz NOT NULL,
    model        text COLLATE "C" NOT NULL,
    arrived      double precision NOT NULL,
    online       double precision NOT NULL,
    calls        bigint NOT NULL,
    busy_seconds double precision NOT NULL,
    refused      double precision NOT NULL,
    starts       integer NOT NULL,
    cold_seconds double precision NOT NULL,
    waiting      integer NOT NULL,
    running      integer NOT NULL,
    base         integer NOT NULL,
    raw          integer NOT NULL,
    stabilised   integer NOT NULL,
    desired      integer NOT NULL,
    ready        integer NOT NULL,
    starting     integer NOT NULL,
    PRIMARY KEY (model, minute)
) PARTITION BY RANGE (minute);
CREATE TABLE penstock.model_minute_default PARTITION OF penstock.model_minute DEFAULT;
COMMENT ON COLUMN penstock.model_minute.online IS 'of arrived: through gateways';
COMMENT ON COLUMN penstock.model_minute.starts IS 'instances that became ready';

-- The history of a model that the next decision needs. It outlives a leader: the next one goes on with the same windows.
CREATE TABLE penstock.scale_state (
    model      text COLLATE "C" PRIMARY KEY REFERENCES penstock.model ON DELETE CASCADE,
    state      jsonb NOT NULL,
    arrived    bigint NOT NULL,
    counters   jsonb NOT NULL DEFAULT '{}',
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
COMMENT ON COLUMN penstock.scale_state.counters IS 'of use, online calls, refused requests and cold starts, as of the decision';
COMMENT ON COLUMN penstock.setting.name IS 'scale.off, scale.zero_off (booleans), scale.max_all, scale.budget (numbers)';
