-- +goose Up

-- The online gateway: settings, preemption of durable entries, and what is folded once. Rules and their reasons:
-- pkg/gateway/doc.go.

-- A gateway is a node without threads. It holds slots, and is no peer of task nodes: not in the fairness of nodes, not in
-- the number of nodes that serve a queue, and not in the decision to suspend recovery.
ALTER TABLE penstock.node ADD COLUMN kind text NOT NULL DEFAULT 'task' CHECK (kind IN ('task', 'gateway'));
COMMENT ON COLUMN penstock.node.kind IS 'task: claims entries; gateway: serves online requests';

-- How many slots a node misses, so that whoever hands over idle ones knows how many.
ALTER TABLE penstock.slot_demand ADD COLUMN missing integer NOT NULL DEFAULT 1;

-- How long calls of durable entries keep their slot. The other columns count online calls as well.
ALTER TABLE penstock.usage_hour ADD COLUMN runs bigint NOT NULL DEFAULT 0, ADD COLUMN run_ms bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN penstock.usage_hour.runs IS 'calls of durable entries whose answer was kept';
COMMENT ON COLUMN penstock.usage_hour.run_ms IS 'for how long these kept their slots, in milliseconds';

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

-- Files of clients, in chunks of bytes in the order of no (ADR 43). A file is visible once it is complete.
CREATE TABLE penstock.gateway_file (
    id         text COLLATE "C" PRIMARY KEY,
    owner      text COLLATE "C" NOT NULL,
    filename   text NOT NULL CHECK (octet_length(filename) <= 1024),
    purpose    text COLLATE "C" NOT NULL,
    bytes      bigint NOT NULL DEFAULT 0,
    chunks     integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed_at timestamptz,
    expires_at timestamptz,
    deleted_at timestamptz
);
CREATE INDEX gateway_file_owner ON penstock.gateway_file (owner, created_at, id);
COMMENT ON COLUMN penstock.gateway_file.owner IS 'name of the token that made it; empty: of an open gateway';
COMMENT ON COLUMN penstock.gateway_file.completed_at IS 'null: it is being written, and not visible';

CREATE TABLE penstock.gateway_file_chunk (
    file_id text COLLATE "C" NOT NULL REFERENCES penstock.gateway_file ON DELETE CASCADE,
    no      integer NOT NULL,
    data    bytea NOT NULL,
    PRIMARY KEY (file_id, no)
);

-- A batch of requests: the lines of a file, each an entry of the queue of the model.
CREATE TABLE penstock.gateway_batch (
    id             text COLLATE "C" PRIMARY KEY,
    owner          text COLLATE "C" NOT NULL,
    flow           text COLLATE "C" NOT NULL,
    endpoint       text COLLATE "C" NOT NULL,
    model          text COLLATE "C",
    queue_id       integer,
    input_file_id  text COLLATE "C" NOT NULL,
    output_file_id text COLLATE "C" NOT NULL,
    error_file_id  text COLLATE "C" NOT NULL,
    status         text NOT NULL DEFAULT 'validating' CHECK (status IN
                   ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')),
    completion_window text NOT NULL,
    output_kept    interval,
    metadata       jsonb,
    errors         jsonb,
    total          integer NOT NULL DEFAULT 0,
    fed            integer NOT NULL DEFAULT 0,
    completed      integer NOT NULL DEFAULT 0,
    failed         integer NOT NULL DEFAULT 0,
    expired_lines  integer NOT NULL DEFAULT 0,
    tokens_in      bigint NOT NULL DEFAULT 0,
    tokens_cached  bigint NOT NULL DEFAULT 0,
    tokens_out     bigint NOT NULL DEFAULT 0,
    next_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    failed_turns   integer NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    in_progress_at timestamptz,
    expires_at     timestamptz NOT NULL,
    finalizing_at  timestamptz,
    completed_at   timestamptz,
    failed_at      timestamptz,
    expired_at     timestamptz,
    cancelling_at  timestamptz,
    cancelled_at   timestamptz
) WITH (fillfactor = 70);
CREATE INDEX gateway_batch_owner ON penstock.gateway_batch (owner, created_at, id);
CREATE INDEX gateway_batch_work ON penstock.gateway_batch (next_at)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
COMMENT ON COLUMN penstock.gateway_batch.fed IS 'lines that were pushed as entries, the first ones';
COMMENT ON COLUMN penstock.gateway_batch.expired_lines IS 'of the failed ones: they had not begun when the batch expired';
COMMENT ON COLUMN penstock.gateway_batch.next_at IS 'when a gateway works on the batch again';
COMMENT ON COLUMN penstock.gateway_batch.failed_turns IS 'since the last one that did not fail, with the one that runs; the pause before the next grows with it';

-- A line that has not ended. What came of an ended one is in the files of the batch.
CREATE TABLE penstock.gateway_batch_line (
    batch_id  text COLLATE "C" NOT NULL REFERENCES penstock.gateway_batch ON DELETE CASCADE,
    line      integer NOT NULL,
    at        bigint NOT NULL,
    bytes     integer NOT NULL,
    custom_id text COLLATE "C" NOT NULL,
    entry_id  bigint,
    cancelled boolean NOT NULL DEFAULT false,
    PRIMARY KEY (batch_id, line)
) WITH (fillfactor = 70);
COMMENT ON COLUMN penstock.gateway_batch_line.at IS 'offset in the input file';
COMMENT ON COLUMN penstock.gateway_batch_line.cancelled IS 'the end of its entry was requested';

-- A prediction: an entry of the queue of a model, as clients of Replicate see it.
CREATE TABLE penstock.prediction (
    id         text COLLATE "C" PRIMARY KEY,
    owner      text COLLATE "C" NOT NULL,
    entry_id   bigint NOT NULL,
    queue_id   integer NOT NULL,
    model      text COLLATE "C" NOT NULL,
    version    text COLLATE "C" NOT NULL,
    input      jsonb NOT NULL,
    stream_key text COLLATE "C",
    webhook    text,
    events     text[] NOT NULL DEFAULT '{}',
    deadline   timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    notified_at timestamptz
);
CREATE INDEX prediction_owner ON penstock.prediction (owner, created_at, id);
CREATE INDEX prediction_notice ON penstock.prediction (created_at) WHERE webhook IS NOT NULL AND notified_at IS NULL;
COMMENT ON COLUMN penstock.prediction.stream_key IS 'part of the address of its stream, which clients read without a token; null: it has no stream';
COMMENT ON COLUMN penstock.prediction.notified_at IS 'when the delivery of the webhook for its end was pushed';
