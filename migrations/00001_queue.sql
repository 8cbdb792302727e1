-- +goose Up

-- The queue itself: registry, entries, ready rows, lock records and what remains of an entry once it is gone.
-- Glossary and rules: pkg/invalidation/doc.go.

CREATE SCHEMA IF NOT EXISTS penstock;

CREATE TYPE penstock.queue_kind AS ENUM ('task', 'batch', 'cron', 'change_log', 'inference', 'webhook');
CREATE TYPE penstock.status AS ENUM ('initial', 'pending');
CREATE TYPE penstock.outcome AS ENUM ('done', 'failed', 'expired', 'cancelled');

-- Entry ids, and the places in line of what comes back into line. No cache: a push that returned before another
-- began must have the smaller number, whatever connections the two used.
CREATE SEQUENCE penstock.entry_id_seq AS bigint CACHE 1;
-- Fencing tokens. Nothing hands them out but the insert of a lock record.
CREATE SEQUENCE penstock.token_seq AS bigint CACHE 1;

CREATE TABLE penstock.queue (
    id                      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                    text COLLATE "C" NOT NULL UNIQUE
                            CHECK (name ~ '^[a-z][a-z0-9_]{0,47}$'),
    kind                    penstock.queue_kind NOT NULL DEFAULT 'task',
    application             text COLLATE "C" NOT NULL DEFAULT 'default' CHECK (application <> ''),
    priority                real NOT NULL DEFAULT 1 CHECK (priority > 0 AND priority <= 1000),
    entry_priority          smallint NOT NULL DEFAULT 1 CHECK (entry_priority BETWEEN 0 AND 9),
    algorithm               text NOT NULL DEFAULT 'fair' CHECK (algorithm IN ('fifo', 'fair')),
    grouping                text CHECK (grouping <> ''),
    mergeable               boolean NOT NULL DEFAULT false,
    merge                   text NOT NULL DEFAULT 'last' CHECK (merge IN ('first', 'last', 'object', 'array')),
    max_concurrent          integer CHECK (max_concurrent > 0),
    max_concurrent_per_node integer CHECK (max_concurrent_per_node > 0),
    capacity                bigint CHECK (capacity > 0),
    retry                   jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(retry) = 'object'),
    crash_limit             smallint NOT NULL DEFAULT 3 CHECK (crash_limit > 0),
    run_timeout             interval CHECK (run_timeout > '0'),
    quantum_count           integer NOT NULL DEFAULT 100 CHECK (quantum_count BETWEEN 1 AND 10000),
    quantum_time            interval NOT NULL DEFAULT '10 seconds' CHECK (quantum_time > '0'),
    payload_limit           integer NOT NULL DEFAULT 262144 CHECK (payload_limit BETWEEN 1 AND 16777216),
    result_retention        interval NOT NULL DEFAULT '1 day' CHECK (result_retention >= '0'),
    failure_retention       interval NOT NULL DEFAULT '30 days' CHECK (failure_retention >= '1 day'),
    model                   text,
    paused_at               timestamptz,
    paused_by               text,
    paused_reason           text,
    paused_until            timestamptz,
    disabled_at             timestamptz,
    disabled_by             text,
    disabled_reason         text,
    version                 bigint NOT NULL DEFAULT 1,
    created_at              timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.queue.priority IS 'weight between queues: a queue of weight 2 is served twice as much as one of weight 1';
COMMENT ON COLUMN penstock.queue.entry_priority IS 'priority of entries that name none, 0 to 9; higher is served first';
COMMENT ON COLUMN penstock.queue.grouping IS 'where the lock key stands in the payload: a field, a path with dots, or a jsonpath that starts with $';
COMMENT ON COLUMN penstock.queue.version IS 'grows with every change, so that nodes see from one number that they must read again';

-- One table for the reader, one for each queue on the disk. A row is inserted and deleted; only a retry, a
-- disable and a due entry's promotion ever update one.
CREATE TABLE penstock.entry (
    id               bigint NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT now(),
    due_at           timestamptz,
    start_by         timestamptz,
    finish_by        timestamptz,
    queue_id         integer NOT NULL,
    status           penstock.status NOT NULL,
    cost             real,
    priority         smallint NOT NULL CHECK (priority BETWEEN -1 AND 9),
    enabled_priority smallint,
    pos              bigint,
    attempt          smallint NOT NULL DEFAULT 0,
    crashes          smallint NOT NULL DEFAULT 0,
    flow             text COLLATE "C" NOT NULL DEFAULT '',
    lock_key         text COLLATE "C",
    name             text COLLATE "C",
    unique_key       text COLLATE "C",
    trace            text,
    callback         jsonb,
    history          jsonb,
    payload          jsonb NOT NULL,
    PRIMARY KEY (queue_id, id)
) PARTITION BY LIST (queue_id);
COMMENT ON COLUMN penstock.entry.attempt IS 'attempts that ended in an error so far';
COMMENT ON COLUMN penstock.entry.crashes IS 'times the node died while it ran this entry; never counted as an attempt';
COMMENT ON COLUMN penstock.entry.enabled_priority IS 'the priority a disabled entry had, for when it is enabled again';
COMMENT ON COLUMN penstock.entry.pos IS 'place in line of a solo entry that came back into line; null means its id';
COMMENT ON COLUMN penstock.entry.history IS 'errors of earlier attempts, oldest first';

-- A ready row says: this lock key has something to claim. The claim scans nothing else.
-- Solo entries: entry_id is set and lock_key is null. Groups: the other way round.
CREATE TABLE penstock.ready (
    pos      bigint NOT NULL,
    entry_id bigint,
    queue_id integer NOT NULL,
    priority smallint NOT NULL,
    flow     text COLLATE "C" NOT NULL,
    lock_key text COLLATE "C",
    PRIMARY KEY (queue_id, priority, flow, pos),
    CHECK ((entry_id IS NULL) <> (lock_key IS NULL))
);
-- The lock key comes first, and look-ups say "queue_id + 0": so no plan, however old, can take the primary key for
-- them and walk through a whole lane.
CREATE INDEX ready_lock_key ON penstock.ready (lock_key, queue_id) WHERE lock_key IS NOT NULL;

-- A lock record: the group is being computed by this node with this token. Never updated; one index.
-- The lock key of a solo entry is '#' and its id; no other lock key may begin with '#'.
CREATE TABLE penstock.lock (
    token         bigint NOT NULL,
    node_id       bigint NOT NULL,
    pos           bigint NOT NULL,
    last_entry_id bigint NOT NULL,
    claimed_at    timestamptz NOT NULL,
    queue_id      integer NOT NULL,
    claim_id      integer NOT NULL,
    entry_count   integer NOT NULL,
    cost          real NOT NULL,
    priority      smallint NOT NULL,
    flow          text COLLATE "C" NOT NULL,
    lock_key      text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue_id, lock_key)
);
COMMENT ON COLUMN penstock.lock.pos IS 'place in line of the ready row it was claimed by, for when the group is handed back';
COMMENT ON COLUMN penstock.lock.last_entry_id IS 'the claim covers the entries of the key up to this id; later ones wait';
COMMENT ON COLUMN penstock.lock.claim_id IS 'number the node gave the claim, so that a claim whose answer was lost can be found again';

ALTER TABLE penstock.ready SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0,
                                autovacuum_analyze_scale_factor = 0.2);
ALTER TABLE penstock.lock  SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0,
                                autovacuum_analyze_scale_factor = 0.2);

-- What remains of an entry that ended well, expired or was cancelled. Dropped by the day.
CREATE TABLE penstock.result (
    entry_id    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT now(),
    queue_id    integer NOT NULL,
    node_id     bigint,
    token       bigint,
    run_ms      bigint,
    attempt     smallint NOT NULL,
    outcome     penstock.outcome NOT NULL CHECK (outcome <> 'failed'),
    reason      text,
    result      jsonb
) PARTITION BY RANGE (finished_at);
CREATE INDEX result_entry ON penstock.result (queue_id, entry_id);
CREATE TABLE penstock.result_default PARTITION OF penstock.result DEFAULT;

-- An entry that ended in error, whole, with its history: the dead letters.
CREATE TABLE penstock.failure (
    entry_id    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    failed_at   timestamptz NOT NULL DEFAULT now(),
    start_by    timestamptz,
    finish_by   timestamptz,
    queue_id    integer NOT NULL,
    cost        real,
    priority    smallint NOT NULL,
    attempt     smallint NOT NULL,
    crashes     smallint NOT NULL,
    flow        text COLLATE "C" NOT NULL,
    lock_key    text COLLATE "C",
    name        text COLLATE "C",
    class       text NOT NULL,
    error       text NOT NULL,
    fingerprint text NOT NULL,
    trace       text,
    callback    jsonb,
    history     jsonb,
    payload     jsonb NOT NULL
) PARTITION BY RANGE (failed_at);
CREATE INDEX failure_entry ON penstock.failure (queue_id, entry_id);
CREATE INDEX failure_fingerprint ON penstock.failure (queue_id, fingerprint);
CREATE TABLE penstock.failure_default PARTITION OF penstock.failure DEFAULT;
COMMENT ON COLUMN penstock.failure.fingerprint IS 'the error with numbers and quoted texts left out: equal for errors of one cause';

-- Idempotent push: (queue, flow, key) names one entry for as long as the row stands.
CREATE TABLE penstock.idempotency (
    entry_id    bigint NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    queue_id    integer NOT NULL,
    flow        text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (queue_id, flow, key)
);
CREATE INDEX idempotency_created_at ON penstock.idempotency USING brin (created_at);

-- Uniqueness: which entry last held a unique key. A row whose entry is gone (or, for the queued policies, has
-- started) stands for nothing: the next push takes it over, and the leader sweeps what nobody took over.
CREATE TABLE penstock.uniqueness (
    entry_id bigint NOT NULL,
    queue_id integer NOT NULL,
    key      text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue_id, key)
);

-- How far a running entry has come, written under its token. A retry or another node resumes from the checkpoint.
CREATE TABLE penstock.progress (
    entry_id   bigint NOT NULL,
    token      bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id   integer NOT NULL,
    done       real CHECK (done BETWEEN 0 AND 1),
    message    text,
    checkpoint jsonb,
    PRIMARY KEY (queue_id, entry_id)
) WITH (fillfactor = 70);

-- A wish that an entry be cancelled that is running, or was just being claimed. The node hears of it with its
-- next heartbeat; whoever ends the entry removes the row.
CREATE TABLE penstock.cancel_request (
    entry_id     bigint NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivered_at timestamptz,
    queue_id     integer NOT NULL,
    actor        text NOT NULL,
    reason       text NOT NULL,
    PRIMARY KEY (queue_id, entry_id)
);

-- Names and lock keys whose entries are disabled, those to come as well.
CREATE TABLE penstock.disabled (
    queue_id   integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    scope      text NOT NULL CHECK (scope IN ('name', 'lock_key')),
    value      text COLLATE "C" NOT NULL,
    actor      text NOT NULL,
    reason     text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, scope, value)
);

-- The depth of queues with a capacity: counted at some moment, with the counters of that moment. The counters
-- are sequences (accepted_<id>, removed_<id>), on which producers do not wait for one another.
CREATE TABLE penstock.depth (
    queue_id    integer PRIMARY KEY REFERENCES penstock.queue ON DELETE CASCADE,
    counted     bigint NOT NULL,
    accepted    bigint NOT NULL,
    removed     bigint NOT NULL,
    drain_rate  real NOT NULL DEFAULT 0,
    counted_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.depth.drain_rate IS 'entries a second that left the queue between the last two counts';

-- Bulk operations on many entries or failures: durable, throttled, cancellable.
CREATE TABLE penstock.operation (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id     integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    verb         text NOT NULL CHECK (verb IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable')),
    filter       jsonb NOT NULL,
    per_second   integer NOT NULL CHECK (per_second > 0),
    actor        text NOT NULL,
    reason       text NOT NULL,
    status       text NOT NULL DEFAULT 'running' CHECK (status IN ('running', 'done', 'cancelled')),
    matched      bigint NOT NULL,
    changed      bigint NOT NULL DEFAULT 0,
    last_id      bigint NOT NULL DEFAULT 0,
    until_id     bigint NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    stepped_at   timestamptz,
    ended_at     timestamptz
);
COMMENT ON COLUMN penstock.operation.matched IS 'entries that matched when the operation was asked for';
COMMENT ON COLUMN penstock.operation.last_id IS 'the operation has dealt with every match up to this entry id; it goes on behind it after a crash';

-- Who did what and why. Only ever inserted.
CREATE TABLE penstock.audit (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text NOT NULL,
    verb       text NOT NULL,
    object     text NOT NULL,
    reason     text,
    detail     jsonb
);

-- One row for each start of a process: its incarnation. The tokens are what it says it computes.
CREATE TABLE penstock.node (
    id           bigint PRIMARY KEY,
    name         text NOT NULL,
    application  text COLLATE "C" NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat         bigint NOT NULL DEFAULT 0,
    lease        interval NOT NULL DEFAULT '10 seconds',
    threads      integer NOT NULL DEFAULT 0,
    queue_ids    integer[] NOT NULL DEFAULT '{}',
    tokens       bigint[] NOT NULL DEFAULT '{}',
    load         jsonb NOT NULL DEFAULT '{}',
    draining_at  timestamptz,
    drain_by     text,
    drain_reason text
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.node.beat IS 'heartbeats so far; recovery compares the token lists of two of them';

-- all_ended takes back a statement that ended fewer entries than locks, because somebody was just changing one.
-- +goose StatementBegin
CREATE FUNCTION penstock.all_ended(locks bigint, entries bigint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF locks <> entries THEN
        RAISE EXCEPTION 'entry changed while it was ended' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN true;
END $$;
-- +goose StatementEnd
