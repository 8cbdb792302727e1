-- +goose Up


-- The queue itself: registry, entries, ready rows, lock records, and the result or failure of an entry that has ended.
-- Glossary and rules: pkg/invalidation/doc.go.
CREATE SCHEMA IF NOT EXISTS penstock;

-- The sets of migrations/functions that were applied, newest last: one row for each set of files, by its hash. A program
-- whose set was applied once and replaced is older than the schema and does not change it (docs/adr/0016-functions-apart-from-tables.md).
CREATE TABLE penstock.schema_version (
    id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash       text NOT NULL UNIQUE,
    release    integer NOT NULL,
    files      jsonb NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.schema_version.files IS 'the hash of each file';

-- The schema as it was when it was applied: later states of the catalog are compared with it. release is the last one
-- that had the object.
CREATE TABLE penstock.schema_object (
    object     text COLLATE "C" PRIMARY KEY,
    definition text NOT NULL,
    release    integer NOT NULL
);

CREATE TYPE penstock.queue_kind AS ENUM ('task', 'batch', 'cron', 'change_log', 'inference', 'webhook');

CREATE TYPE penstock.status AS ENUM ('initial', 'pending');

CREATE TYPE penstock.outcome AS ENUM ('done', 'failed', 'expired', 'cancelled');

-- Entry ids, and the positions of requeued entries. No cache: a push that returned before another began must have the
-- smaller number, on any two connections.
CREATE SEQUENCE penstock.entry_id_seq AS bigint CACHE 1;

-- Fencing tokens. Only the insert of a lock record or a slot draws them.
CREATE SEQUENCE penstock.token_seq AS bigint CACHE 1;
-- A sequence that was never drawn from has the last_value 1, like one that was drawn from once.
SELECT nextval('penstock.token_seq');

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
    max_concurrent_per_name integer CHECK (max_concurrent_per_name BETWEEN 1 AND 100),
    shards                  integer NOT NULL DEFAULT 1 CHECK (shards BETWEEN 1 AND 64),
    capacity                bigint CHECK (capacity > 0),
    capacity_per_flow       bigint CHECK (capacity_per_flow > 0),
    capacity_per_slot       real CHECK (capacity_per_slot > 0),
    retry                   jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(retry) = 'object'),
    crash_limit             smallint NOT NULL DEFAULT 3 CHECK (crash_limit > 0),
    run_timeout             interval CHECK (run_timeout > '0'),
    start_within            interval CHECK (start_within > '0'),
    finish_within           interval CHECK (finish_within > '0'),
    on_failure              text NOT NULL DEFAULT 'continue' CHECK (on_failure IN ('continue', 'block_key')),
    quantum_count           integer NOT NULL DEFAULT 100 CHECK (quantum_count BETWEEN 1 AND 10000),
    quantum_time            interval NOT NULL DEFAULT '10 seconds' CHECK (quantum_time > '0'),
    payload_limit           integer NOT NULL DEFAULT 262144 CHECK (payload_limit BETWEEN 1 AND 16777216),
    result_retention        interval NOT NULL DEFAULT '1 day' CHECK (result_retention >= '0'),
    failure_retention       interval NOT NULL DEFAULT '30 days' CHECK (failure_retention >= '1 day'),
    model                   text,
    on_no_instance          text NOT NULL DEFAULT 'wait' CHECK (on_no_instance IN ('wait', 'fail')),
    no_instance_timeout     interval NOT NULL DEFAULT '1 minute' CHECK (no_instance_timeout >= '0'),
    lapse                   text CHECK (lapse IN ('end', 'run_through')),
    paused_at               timestamptz,
    paused_by               text,
    paused_reason           text,
    paused_until            timestamptz,
    disabled_at             timestamptz,
    disabled_by             text,
    disabled_reason         text,
    version                 bigint NOT NULL DEFAULT 1,
    created_at              timestamptz NOT NULL DEFAULT now(),
    statements              jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(statements) = 'object'),
    needs                   jsonb CHECK (jsonb_typeof(needs) = 'object')
);
COMMENT ON COLUMN penstock.queue.priority IS 'weight between queues: a queue of weight 2 is served twice as much as one of weight 1';
COMMENT ON COLUMN penstock.queue.entry_priority IS 'priority of entries that name none, 0 to 9; higher is served first';
COMMENT ON COLUMN penstock.queue.grouping IS 'where the lock key is in the payload: a field, a path with dots, or a jsonpath that starts with $';
COMMENT ON COLUMN penstock.queue.max_concurrent_per_name IS 'entries of one name at once over all nodes; entries with a name get one of so many lock keys of it when they are pushed';
COMMENT ON COLUMN penstock.queue.shards IS 'flows over which entries that are pushed without a flow are spread by their lock keys, shard-0 to shard-<shards - 1>; with 1 they have no flow';
COMMENT ON COLUMN penstock.queue.capacity_per_flow IS 'entries of one flow that have not ended; more pushes of the flow are refused';
COMMENT ON COLUMN penstock.queue.capacity_per_slot IS 'entries for each slot of the usable instances of the model: a capacity that follows them, of one slot at least';
COMMENT ON COLUMN penstock.queue.on_no_instance IS 'entries of a model without a usable instance: wait, or fail; pushes are refused then, and after no_instance_timeout waiting entries fail';
COMMENT ON COLUMN penstock.queue.on_failure IS 'when an entry with a lock key fails for good: continue with the next of the key, or block_key until unblock_key';
COMMENT ON COLUMN penstock.queue.lapse IS 'what becomes of running entries while their node cannot renew its lease: end, or run_through; null: run_through with a model, else end';
COMMENT ON COLUMN penstock.queue.needs IS 'use of the node by one entry while it runs, {"cpu": cores, "memory_mib": MiB}: nodes run no more entries than fit';
COMMENT ON COLUMN penstock.queue.version IS 'grows with every change, so that nodes see from one number that they must read again';
COMMENT ON COLUMN penstock.queue.statements IS 'the statements that task nodes run for its entries, with the rights of the nodes; see set_statements';

-- The default of entry.depth needs a function of this name. This body is replaced by the one in functions/changelog.sql,
-- which is applied with all others before anything is pushed.
CREATE FUNCTION penstock.check_depth(target text DEFAULT 'a queue') RETURNS smallint LANGUAGE sql AS 'SELECT 0::smallint';

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
    depth            smallint NOT NULL DEFAULT
                     CASE WHEN coalesce(current_setting('penstock.depth', true), '') = '' THEN 0::smallint ELSE penstock.check_depth() END,
    PRIMARY KEY (queue_id, id)
) PARTITION BY LIST (queue_id);
COMMENT ON COLUMN penstock.entry.attempt IS 'attempts that ended in an error so far';
COMMENT ON COLUMN penstock.entry.crashes IS 'times the node died while it ran this entry; never counted as an attempt';
COMMENT ON COLUMN penstock.entry.enabled_priority IS 'the priority a disabled entry had, for when it is enabled again';
COMMENT ON COLUMN penstock.entry.pos IS 'position of a solo entry that was requeued; null means its id';
COMMENT ON COLUMN penstock.entry.history IS 'errors of earlier attempts, oldest first';
COMMENT ON COLUMN penstock.entry.depth IS 'entries that lie between this one and a push from outside; bounded, so that loops end';

-- A ready row: this lock key has claimable entries. The claim scans no other table.
-- Solo entries: entry_id is set and lock_key is null. Groups: the other way round.
-- A row that was released with a delay keeps its position and may not be claimed before not_before.
-- A throttled lock key has the priority that penstock.throttled_priority returns, and a time for its position.
CREATE TABLE penstock.ready (
    pos        bigint NOT NULL,
    entry_id   bigint,
    not_before timestamptz,
    queue_id   integer NOT NULL,
    priority   smallint NOT NULL,
    flow       text COLLATE "C" NOT NULL,
    lock_key   text COLLATE "C",
    PRIMARY KEY (queue_id, priority, flow, pos),
    CHECK ((entry_id IS NULL) <> (lock_key IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2);

-- The lock key comes first, and lookups write "queue_id + 0": so no plan, however old, can use the primary key for
-- them and scan a whole lane.
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
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2);
COMMENT ON COLUMN penstock.lock.pos IS 'position of the ready row it was claimed by, for a release of the group';
COMMENT ON COLUMN penstock.lock.last_entry_id IS 'the claim covers the entries of the key up to this id; later ones wait';
COMMENT ON COLUMN penstock.lock.claim_id IS 'number the node gave the claim, so that a claim whose answer was lost can be found again';

-- The result of an entry that ended as done, expired or was cancelled. Dropped by the day.
-- now() is when the transaction began: a statement that ran for an hour in the transaction of its end would have ended
-- before it began to work, and a nominal time of cron that came during the run would not have been skipped.
CREATE TABLE penstock.result (
    entry_id    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id    integer NOT NULL,
    node_id     bigint,
    token       bigint,
    run_ms      bigint,
    attempt     smallint NOT NULL,
    outcome     penstock.outcome NOT NULL CHECK (outcome <> 'failed'),
    reason      text,
    result      jsonb,
    meta        jsonb
) PARTITION BY RANGE (finished_at);
CREATE INDEX result_entry ON penstock.result (queue_id, entry_id);
CREATE INDEX result_finished_at ON penstock.result USING brin (finished_at) WITH (autosummarize = on, pages_per_range = 32);

CREATE TABLE penstock.result_default PARTITION OF penstock.result DEFAULT;
COMMENT ON COLUMN penstock.result.meta IS 'measured by the handler: instance, slot, times in milliseconds';

-- An entry that ended in error, whole, with its history: the dead letters.
CREATE TABLE penstock.failure (
    entry_id    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    failed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
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
    payload     jsonb NOT NULL,
    depth       smallint NOT NULL DEFAULT 0
) PARTITION BY RANGE (failed_at);
CREATE INDEX failure_entry ON penstock.failure (queue_id, entry_id);
CREATE INDEX failure_failed_at ON penstock.failure USING brin (failed_at) WITH (autosummarize = on, pages_per_range = 32);
CREATE INDEX failure_fingerprint ON penstock.failure (queue_id, fingerprint, entry_id);

CREATE TABLE penstock.failure_default PARTITION OF penstock.failure DEFAULT;
COMMENT ON COLUMN penstock.failure.fingerprint IS 'the error with numbers and quoted texts left out: equal for errors of one cause';
COMMENT ON COLUMN penstock.failure.depth IS 'of the entry, so that a loop cannot begin again when its failure is retried';

-- Idempotent push: (queue, flow, key) names one entry for as long as the row exists.
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
-- started) has no effect: the next push with the key replaces it, and the leader sweeps the others.
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

-- A request to cancel an entry that is running, or was just being claimed. The node reads it with its next
-- heartbeat; the end of the entry removes the row.
CREATE TABLE penstock.cancel_request (
    entry_id     bigint NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivered_at timestamptz,
    queue_id     integer NOT NULL,
    actor        text NOT NULL,
    reason       text NOT NULL,
    PRIMARY KEY (queue_id, entry_id)
);

-- Names and lock keys whose entries are disabled, later ones as well.
CREATE TABLE penstock.disabled (
    queue_id   integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    scope      text NOT NULL CHECK (scope IN ('name', 'lock_key')),
    value      text COLLATE "C" NOT NULL,
    actor      text NOT NULL,
    reason     text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, scope, value)
);

-- Lock keys whose entries do not run since one of them failed (on_failure of the queue). A claim reads the entries of a
-- group behind its own commit, and this table with them; see functions/blocked_keys.sql.
CREATE TABLE penstock.blocked_key (
    entry_id   bigint NOT NULL,
    blocked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id   integer NOT NULL,
    lock_key   text COLLATE "C" NOT NULL,
    class      text NOT NULL,
    error      text NOT NULL,
    PRIMARY KEY (queue_id, lock_key)
);
COMMENT ON COLUMN penstock.blocked_key.entry_id IS 'the entry whose failure blocks the key; class and error are those of the failure, which may be gone';

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

-- Since when a model has had no usable instance, for models of queues with on_no_instance = fail. The elected leader
-- writes it.
CREATE TABLE penstock.model_outage (
    model text COLLATE "C" PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Bulk operations on many entries or failures. Durable: the row has the progress. Throttled: a step changes no more than
-- per_second allows since the step before. Cancellable between steps. A step reads 10,000 entries and changes 500 at
-- most, so that it keeps its locks for some tens of milliseconds with any filter.
CREATE TABLE penstock.operation (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id     integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    verb         text NOT NULL CHECK (verb IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable', 'delete')),
    filter       jsonb NOT NULL,
    per_second   integer NOT NULL CHECK (per_second > 0),
    actor        text NOT NULL,
    reason       text NOT NULL,
    status       text NOT NULL DEFAULT 'running' CHECK (status IN ('running', 'done', 'cancelled')),
    matched      bigint NOT NULL,
    changed      bigint NOT NULL DEFAULT 0,
    last_id      bigint NOT NULL DEFAULT 0,
    until_id     bigint NOT NULL,
    busy         bigint[] NOT NULL DEFAULT '{}',
    switched_in  xid8,
    barrier      xid8,
    open_before  bigint,
    created_at   timestamptz NOT NULL DEFAULT now(),
    stepped_at   timestamptz,
    ended_at     timestamptz
);
CREATE INDEX operation_running ON penstock.operation (id) WHERE status = 'running';
COMMENT ON COLUMN penstock.operation.matched IS 'entries that matched when the operation was asked for';
COMMENT ON COLUMN penstock.operation.last_id IS 'the operation has dealt with every match up to this entry id, but those in busy; it goes on behind it after a crash';
COMMENT ON COLUMN penstock.operation.busy IS 'matches that another transaction had locked, to be tried again';
COMMENT ON COLUMN penstock.operation.switched_in IS 'of disable_entries and enable_entries: the transaction that changed penstock.disabled';
COMMENT ON COLUMN penstock.operation.barrier IS 'a transaction that began to write after that one had committed: those after it have read the change';
COMMENT ON COLUMN penstock.operation.open_before IS 'how many transactions older than barrier were open when the current pass over the queue began; after a pass with 0 the operation ends';

-- Up to when the results and failures of each queue that have passed its retention are deleted, see penstock.tidy_outcomes.
CREATE TABLE penstock.retained (
    queue_id integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    kind     text NOT NULL CHECK (kind IN ('result', 'failure')),
    until    timestamptz NOT NULL,
    PRIMARY KEY (queue_id, kind)
) WITH (fillfactor = 70);

-- The audit: actor, verb, object and reason of each change. Rows are only inserted, and pruned by retention.
CREATE TABLE penstock.audit (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text NOT NULL,
    verb       text NOT NULL,
    object     text NOT NULL,
    reason     text,
    detail     jsonb
);

-- One row for each start of a process: its incarnation. tokens and running are written by its heartbeats.
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
    running      bigint[] NOT NULL DEFAULT '{}',
    crashed_queues  integer[] NOT NULL DEFAULT '{}',
    crashed_entries bigint[] NOT NULL DEFAULT '{}',
    load         jsonb NOT NULL DEFAULT '{}',
    draining_at  timestamptz,
    drain_by     text,
    drain_reason text
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.node.tokens IS 'locks that the node holds';
COMMENT ON COLUMN penstock.node.running IS 'those of them under which an entry has begun to run: only these are crashes when the node dies';
COMMENT ON COLUMN penstock.node.crashed_entries IS 'entries that count a crash since its lease lapsed, of the queues beside; taken back if it is heard again';
COMMENT ON COLUMN penstock.node.beat IS 'heartbeats so far; recovery compares the token lists of two of them';

-- A queue (queue_wide) or one flow of it is throttled for a time, because a service downstream asked for it, with a 429
-- for example. Claims read this table, so that every node stops at once. The flow comes before queue_wide in the key, so
-- that one index scan finds both throttles of a lane.
CREATE TABLE penstock.throttle (
    until      timestamptz NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id   integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    queue_wide boolean NOT NULL,
    flow       text COLLATE "C" NOT NULL CHECK (flow = '' OR NOT queue_wide),
    reason     text NOT NULL,
    PRIMARY KEY (queue_id, flow, queue_wide)
);

-- Leaders. Rules and their reasons: pkg/election/doc.go.

-- Terms, over all elections: a new term is larger than any before it, even after deletes from the table.
CREATE SEQUENCE penstock.term_seq AS bigint CACHE 1;

-- One row for each election. A new term is a new value of a unique column: taking over needs the row for itself
-- and so excludes sessions that have it FOR KEY SHARE (holds_term); renewing does not.
CREATE TABLE penstock.leader (
    name        text COLLATE "C" PRIMARY KEY,
    term        bigint NOT NULL UNIQUE DEFAULT nextval('penstock.term_seq'),
    incarnation bigint NOT NULL DEFAULT 0,
    holder      text NOT NULL DEFAULT '',
    lease       interval NOT NULL DEFAULT '4 seconds' CHECK (lease > '0'),
    changes     bigint NOT NULL DEFAULT 0,
    elected_at  timestamptz,
    renewed_at  timestamptz
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.leader.renewed_at IS 'the term ends one lease later; null: its holder has resigned';
COMMENT ON COLUMN penstock.leader.changes IS 'terms so far';

-- Inference: models, their instances, and the holders of slots. Rules and their reasons: pkg/inference/doc.go.

-- Models and instances change rarely and are read by every node: a new number means that they must be read again. A row
-- and not a sequence, because the number must not be seen before the change.
CREATE TABLE penstock.inference_version (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version bigint NOT NULL DEFAULT 1
) WITH (fillfactor = 50);

INSERT INTO penstock.inference_version DEFAULT VALUES;

CREATE TABLE penstock.model (
    name       text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 200),
    config     jsonb NOT NULL CHECK (jsonb_typeof(config) = 'object'),
    override   jsonb CHECK (jsonb_typeof(override) = 'object'),
    version    bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.model.config IS 'how its workers are spoken to; a field that is absent takes its default';
COMMENT ON COLUMN penstock.model.override IS 'fields laid over config while it is there; deleting it brings config back';

CREATE TABLE penstock.instance (
    id                integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model             text COLLATE "C" NOT NULL REFERENCES penstock.model,
    server            text COLLATE "C" NOT NULL CHECK (octet_length(server) BETWEEN 1 AND 200),
    endpoint          text NOT NULL,
    slots             integer NOT NULL CHECK (slots BETWEEN 1 AND 100000),
    labels            jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(labels) = 'object'),
    state             text NOT NULL DEFAULT 'unknown'
                      CHECK (state IN ('unknown', 'starting', 'ready', 'busy', 'unhealthy', 'defunct')),
    reason            text,
    active            integer,
    capacity          integer,
    queued            integer,
    kv_usage          real,
    checked_at        timestamptz,
    next_check_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    draining_at       timestamptz,
    drain_by          text,
    drain_reason      text,
    quarantined_until timestamptz,
    quarantine_reason text,
    created_at        timestamptz NOT NULL DEFAULT now(),
    device_group      text COLLATE "C" GENERATED ALWAYS AS (labels->>'device_group') STORED,
    UNIQUE (model, server)
) WITH (fillfactor = 50);
CREATE INDEX instance_device_group ON penstock.instance (device_group) WHERE device_group IS NOT NULL;
COMMENT ON COLUMN penstock.instance.device_group IS 'instances of any models that share devices; together they hold no more slots than the group has';
COMMENT ON COLUMN penstock.instance.state IS 'result of the last probe; unknown before the first one, and usable then';
COMMENT ON COLUMN penstock.instance.active IS 'running calls that the worker reported; null where its protocol has no such report';
COMMENT ON COLUMN penstock.instance.next_check_at IS 'the node that moves it forward probes the instance';

-- How many slots the instances of a device group hold together. A group without a row has as many as its largest instance.
CREATE TABLE penstock.device_group (
    name       text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 200),
    slots      integer NOT NULL CHECK (slots BETWEEN 1 AND 100000),
    changed_at timestamptz NOT NULL DEFAULT now()
);

-- A held slot is a lock record: this node may have one call at a time in flight to the instance. There is a row only
-- while it is held. A slot in doubt has no caller any more, but its call may still run at the worker: it stays counted
-- until a probe, a confirmed cancel or a timeout shows otherwise.
CREATE TABLE penstock.slot (
    instance_id integer NOT NULL REFERENCES penstock.instance,
    number      integer NOT NULL CHECK (number >= 0),
    token       bigint NOT NULL,
    node_id     bigint NOT NULL,
    leased_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    doubt_at    timestamptz,
    doubt       text,
    queue_id    integer,
    entry_id    bigint,
    PRIMARY KEY (instance_id, number)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX slot_node ON penstock.slot (node_id);
COMMENT ON COLUMN penstock.slot.doubt IS 'why the call may still run; queue_id and entry_id are those of its entry';

-- Nodes that got fewer slots than they have work for. Others give back slots beyond their share: a node that has none
-- comes before one that has some, and the nodes without a slot for longest come first.
CREATE TABLE penstock.slot_demand (
    model     text COLLATE "C" NOT NULL,
    node_id   bigint NOT NULL,
    wanted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model, node_id)
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.slot_demand.since IS 'since when the node has too few; wanted_at is its last request, and 3 s later it is taken to need no more slots';

-- A run that a worker accepted, with the data by which the next node follows it to its end instead of starting it again.
CREATE TABLE penstock.remote_run (
    entry_id    bigint NOT NULL,
    token       bigint NOT NULL,
    slot_token  bigint NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    ran_ms      bigint NOT NULL DEFAULT 0,
    queue_id    integer NOT NULL,
    instance_id integer NOT NULL,
    slot_number integer NOT NULL,
    remote_id   text,
    report      jsonb,
    PRIMARY KEY (queue_id, entry_id)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX remote_run_remote ON penstock.remote_run (instance_id, remote_id);
COMMENT ON COLUMN penstock.remote_run.token IS 'under which the worker was asked: the fencing token of the lock then';
COMMENT ON COLUMN penstock.remote_run.remote_id IS 'the worker''s name for the run; null if its answer never came';
COMMENT ON COLUMN penstock.remote_run.report IS 'the last report of the worker to a callback address without a listener';

-- Runs of an entry that cost an instance its device, or ran out of memory: the next node must know of them.
CREATE TABLE penstock.entry_harm (
    entry_id    bigint NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id    integer NOT NULL,
    instance_id integer NOT NULL,
    times       integer NOT NULL DEFAULT 1,
    class       text NOT NULL,
    PRIMARY KEY (queue_id, entry_id, class, instance_id)
);

-- What calls to workers took, by the hour. Nodes fold into it every few seconds; it is kept for 13 months.
CREATE TABLE penstock.usage_hour (
    hour          timestamptz NOT NULL,
    queue_id      integer NOT NULL,
    calls         bigint NOT NULL,
    gpu_ms        bigint NOT NULL,
    wasted_ms     bigint NOT NULL,
    tokens_in     bigint NOT NULL,
    tokens_cached bigint NOT NULL,
    tokens_out    bigint NOT NULL,
    model         text COLLATE "C" NOT NULL,
    flow          text COLLATE "C" NOT NULL,
    PRIMARY KEY (hour, queue_id, model, flow)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
COMMENT ON COLUMN penstock.usage_hour.gpu_ms IS 'milliseconds that slots were busy, times the GPUs of their instance; a batch''s is divided among its entries';
COMMENT ON COLUMN penstock.usage_hour.wasted_ms IS 'of these, for runs whose answer was not kept';

-- Where callbacks are delivered. The address '' holds the secret of every address that has none of its own.
-- Secrets are sealed under the key of the installation, or a reference to where they are kept (env:NAME, file:/path).
-- Those that were written in clear stay readable until they are rotated.
CREATE TABLE penstock.webhook_endpoint (
    url             text COLLATE "C" PRIMARY KEY CHECK (octet_length(url) <= 2048),
    secret          text CHECK (secret ~ '^(sealed:|env:|file:/|whsec_)'),
    old_secret      text CHECK (old_secret ~ '^(sealed:|env:|file:/|whsec_)'),
    old_until       timestamptz,
    disabled_at     timestamptz,
    disabled_reason text,
    created_at      timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.webhook_endpoint.secret IS 'sealed:... under the key of the installation, or env:NAME or file:/path on the nodes that deliver';
COMMENT ON COLUMN penstock.webhook_endpoint.old_secret IS 'signs beside secret until old_until, so that a receiver can change over';

-- A limit bounds how many locks of its queues there may be at once (max_units), how fast they may be taken (rate,
-- burst), or both; over all flows together or for each flow by itself. A queue uses a limit with so many units a
-- lock. The use is counted from the lock records themselves: there is no counter that could drift.
CREATE TABLE penstock."limit" (
    id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text COLLATE "C" NOT NULL UNIQUE CHECK (name <> ''),
    per_flow   boolean NOT NULL DEFAULT false,
    max_units  integer CHECK (max_units >= 0),
    rate       real CHECK (rate > 0),
    burst      real CHECK (burst > 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    per_key    boolean NOT NULL DEFAULT false,
    uncounted_to bigint NOT NULL DEFAULT 0,
    CHECK ((rate IS NULL) = (burst IS NULL)),
    CHECK (max_units IS NOT NULL OR rate IS NOT NULL),
    CHECK (NOT per_key OR (max_units IS NULL AND NOT per_flow)), -- a key has one holder at a time under any limit
    CONSTRAINT limit_finite_check CHECK (rate < 'Infinity' AND burst < 'Infinity') -- a bucket must hold a number
);
COMMENT ON COLUMN penstock."limit".max_units IS 'units at once';
COMMENT ON COLUMN penstock."limit".rate IS 'units a second that flow into the token bucket';
COMMENT ON COLUMN penstock."limit".burst IS 'units that the token bucket holds';
COMMENT ON COLUMN penstock."limit".per_key IS 'the rate is that of each lock key';
COMMENT ON COLUMN penstock."limit".uncounted_to IS 'locks with tokens up to this one are within max_units without a count';

CREATE TABLE penstock.limit_use (
    queue_id integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    limit_id integer NOT NULL REFERENCES penstock."limit" ON DELETE CASCADE,
    units    integer NOT NULL DEFAULT 1 CHECK (units > 0),
    since    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, limit_id)
);
CREATE INDEX limit_use_limit ON penstock.limit_use (limit_id);
COMMENT ON COLUMN penstock.limit_use.since IS 'when its units, or per_flow or per_key of the limit, changed last: units taken before are not refunded';

-- Token buckets of limits with a rate: how many units there were at a time. Written by claims that have the limit's
-- advisory lock.
-- Without a foreign key: looking up the limit for every bucket that a claim writes cost more than the bucket. Tidy removes
-- the buckets of limits that are gone.
CREATE TABLE penstock.bucket (
    limit_id integer NOT NULL,
    units    double precision NOT NULL,
    at       timestamptz NOT NULL,
    flow     text COLLATE "C" NOT NULL,
    PRIMARY KEY (limit_id, flow)
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.bucket.flow IS 'or lock key, of a limit for each key; empty for a limit over all';

-- Scheduled work. The engine (pkg/cron) runs on the elected leader; its decisions are applied here, set-based, in
-- transactions that name its term.
--
--   no entry ──create──► waiting (entry initial) ──fire──► fired (entry pending, runs, is retried) ──end──► no entry
--
-- At most one entry of a job exists. Every change of a job locks its row: the engine takes rows FOR UPDATE SKIP LOCKED
-- and so never waits for an operator; an operator waits for the engine's transaction, two seconds at most.
CREATE TABLE penstock.cron_job (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id       integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    name           text COLLATE "C" NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 256),
    spec           text NOT NULL,
    zone           text NOT NULL DEFAULT 'UTC',
    jitter         interval NOT NULL DEFAULT '0' CHECK (jitter BETWEEN '0' AND '1 day'),
    starts_at      timestamptz CHECK (isfinite(starts_at)),
    ends_at        timestamptz CHECK (isfinite(ends_at)),
    catch_up       text NOT NULL DEFAULT 'last' CHECK (catch_up IN ('none', 'last', 'all')),
    catch_up_max   smallint NOT NULL DEFAULT 100 CHECK (catch_up_max BETWEEN 1 AND 1000),
    grace          interval NOT NULL DEFAULT '1 minute' CHECK (grace > '0'),
    gap            text CHECK (gap IN ('fire', 'skip')),
    fold           text CHECK (fold IN ('first', 'both')),
    overlap        text NOT NULL DEFAULT 'skip' CHECK (overlap IN ('skip', 'queue', 'cancel_running')),
    payload        jsonb NOT NULL DEFAULT '{}',
    lock_key       text COLLATE "C",
    flow           text COLLATE "C",
    priority       smallint CHECK (priority BETWEEN 0 AND 9),
    paused_at      timestamptz,
    paused_by      text,
    paused_reason  text,
    paused_until   timestamptz,
    problem        text,
    run_now_at     timestamptz,
    handled_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    catching_up_to timestamptz,
    nominal_at     timestamptz,
    due_at         timestamptz,
    entry_id       bigint,
    fired_at       timestamptz,
    following_at   timestamptz,
    ended_at       timestamptz,
    check_at        timestamptz NOT NULL DEFAULT '-infinity',
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 70);
COMMENT ON COLUMN penstock.cron_job.problem IS 'why the job has no entry: a spec that cannot be read, or a push that was refused';
COMMENT ON COLUMN penstock.cron_job.handled_at IS 'nominal times up to this one have been fired or dropped';
COMMENT ON COLUMN penstock.cron_job.catching_up_to IS 'the last of several missed nominal times that are fired one after another';
COMMENT ON COLUMN penstock.cron_job.due_at IS 'nominal time plus jitter: when the waiting entry fires; -infinity: run_cron_job_now was called';
COMMENT ON COLUMN penstock.cron_job.fired_at IS 'when the entry was fired; null: it waits';
COMMENT ON COLUMN penstock.cron_job.following_at IS 'when the running entry is to be cancelled, since the next nominal time has come';
COMMENT ON COLUMN penstock.cron_job.check_at IS 'when a job without an entry is read again; infinity: only after it was altered';
CREATE UNIQUE INDEX cron_job_entry ON penstock.cron_job (entry_id) WHERE entry_id IS NOT NULL;
CREATE INDEX cron_job_waiting ON penstock.cron_job (due_at) WHERE entry_id IS NOT NULL AND fired_at IS NULL;
CREATE INDEX cron_job_fired ON penstock.cron_job (queue_id, id) WHERE entry_id IS NOT NULL AND fired_at IS NOT NULL;
CREATE INDEX cron_job_check ON penstock.cron_job (check_at) WHERE entry_id IS NULL;
CREATE INDEX cron_job_following ON penstock.cron_job (following_at) WHERE following_at IS NOT NULL;

-- A nominal time of a job fires once: the row goes in with the firing, and goes with the job (drop_firings). Without a
-- foreign key: a fifth of the time to fire 100,000 jobs went into looking up the job, which the transaction has locked.
CREATE TABLE penstock.cron_firing (
    job_id     bigint NOT NULL,
    nominal_at timestamptz NOT NULL,
    fired_at   timestamptz NOT NULL,
    entry_id   bigint NOT NULL,
    manual     boolean NOT NULL,
    PRIMARY KEY (job_id, nominal_at)
);
CREATE INDEX cron_firing_fired_at ON penstock.cron_firing USING brin (fired_at);
COMMENT ON COLUMN penstock.cron_firing.manual IS 'requested with run_cron_job_now; the nominal time is that of the request';

-- Change log: changes of a watched table by a statement become entries of a change_log queue, in the transaction of the
-- change.

CREATE TABLE penstock.watch (
    watched    regclass NOT NULL,
    queue_id   integer NOT NULL REFERENCES penstock.queue,
    columns    text[] NOT NULL,
    keys       text[] NOT NULL,
    actor      text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (watched, queue_id)
);

-- Batch jobs: a set, split into parts, each the work of one entry. The duty of pkg/batch steps them on the elected
-- leader.
--
--   splitting ──► running ──► ending ──► done, failed, cancelled
--
-- The ends of parts do not contend for a row: each writes the part's own row, and the number left is counted on demand.
-- Only a bounded number of parts is in the queue at a time (window_parts), the others wait here: so a batch of a million
-- parts can be paused and cancelled at once, and does not fill a queue. The batch's own row is locked by the duty while
-- it steps, and by operators.
CREATE TABLE penstock.batch (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id            integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    name                text NOT NULL,
    status              text NOT NULL DEFAULT 'splitting' CHECK (status IN ('splitting', 'running', 'ending', 'done', 'failed', 'cancelled')),
    query               text,
    items               jsonb CHECK (jsonb_typeof(items) = 'array'),
    part_size           integer NOT NULL DEFAULT 100 CHECK (part_size BETWEEN 1 AND 100000),
    window_parts        integer NOT NULL DEFAULT 1000 CHECK (window_parts BETWEEN 1 AND 10000),
    detail              jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(detail) = 'object'),
    flow                text COLLATE "C",
    priority            smallint CHECK (priority BETWEEN 0 AND 9),
    completion_queue_id integer REFERENCES penstock.queue ON DELETE SET NULL,
    actor               text NOT NULL,
    paused_at           timestamptz,
    paused_by           text,
    paused_reason       text,
    paused_until        timestamptz,
    cancelled_by        text,
    cancelled_reason    text,
    split_entry_id      bigint,
    completion_entry_id bigint,
    result              jsonb,
    problem             text,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at            timestamptz,
    CHECK (num_nonnulls(query, items) <= 1)
);
CREATE INDEX batch_open ON penstock.batch (id) WHERE ended_at IS NULL;
CREATE INDEX batch_ended ON penstock.batch (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON COLUMN penstock.batch.items IS 'the set, until it is split';
COMMENT ON COLUMN penstock.batch.query IS 'a SELECT whose rows are the set; it is run by a task node, with its rights';
COMMENT ON COLUMN penstock.batch.detail IS 'goes into the payload of every entry of the batch';
COMMENT ON COLUMN penstock.batch.completion_queue_id IS 'where the completion entry goes: the one that is pushed once, when all parts have ended';

CREATE TABLE penstock.batch_part (
    batch_id bigint NOT NULL REFERENCES penstock.batch ON DELETE CASCADE,
    no       integer NOT NULL,
    outcome  penstock.outcome,
    entry_id bigint,
    ended_at timestamptz,
    error    text,
    items    jsonb NOT NULL,
    result   jsonb,
    PRIMARY KEY (batch_id, no)
) WITH (fillfactor = 80);
CREATE INDEX batch_part_waiting ON penstock.batch_part (batch_id, no) WHERE ended_at IS NULL AND entry_id IS NULL;
CREATE INDEX batch_part_queued ON penstock.batch_part (batch_id, no) WHERE ended_at IS NULL AND entry_id IS NOT NULL;
CREATE INDEX batch_part_bad ON penstock.batch_part (batch_id, no) WHERE outcome <> 'done';

-- Pauses of scopes smaller or larger than a queue. A pause is a row with actor, reason and end. Nodes read those of
-- flows, models and applications with their queues (when RegistryVersion has changed), and their own with every
-- heartbeat. Entries of a paused name or lock key are disabled, since a claim reads neither.
CREATE TABLE penstock.pause (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope      text NOT NULL CHECK (scope IN ('name', 'lock_key', 'flow', 'model', 'application', 'node')),
    value      text COLLATE "C" NOT NULL,
    queue_id   integer REFERENCES penstock.queue ON DELETE CASCADE,
    actor      text NOT NULL,
    reason     text NOT NULL,
    until      timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (CASE WHEN scope IN ('name', 'lock_key') THEN queue_id IS NOT NULL WHEN scope <> 'flow' THEN queue_id IS NULL ELSE true END)
);
CREATE UNIQUE INDEX pause_what ON penstock.pause (scope, value, coalesce(queue_id, 0));
COMMENT ON COLUMN penstock.pause.value IS 'a name, lock key or flow (empty: entries without one), a model, an application, or the name or id of a node';
COMMENT ON COLUMN penstock.pause.queue_id IS 'names and lock keys are those of a queue; a flow may be paused in one queue or, with null, in all';

-- Tokens of the HTTP API, with their scopes. A secret is shown once, when it is made; here is only its SHA-256, which is
-- enough for 256 random bits. Rows of one name are one identity: a rotation adds a row and lets the older ones run out.
CREATE TABLE penstock.api_token (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text COLLATE "C" NOT NULL CHECK (name ~ '^[a-zA-Z0-9][a-zA-Z0-9._@-]{0,62}$'),
    hash         bytea NOT NULL UNIQUE CHECK (length(hash) = 32),
    scopes       text[] NOT NULL CHECK (cardinality(scopes) > 0 AND scopes <@ ARRAY['push', 'read', 'operate', 'admin']),
    applications text[] NOT NULL DEFAULT '{}',
    queues       text[] NOT NULL DEFAULT '{}',
    flows        text[] NOT NULL DEFAULT '{}',
    priority_max smallint CHECK (priority_max BETWEEN 0 AND 9),
    rate         double precision CHECK (rate > 0 AND rate <= 1e9),
    burst        integer CHECK (burst > 0),
    CHECK (burst IS NULL OR rate IS NOT NULL),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text NOT NULL,
    expires_at   timestamptz,
    revoked_at   timestamptz,
    used_at      timestamptz,
    CONSTRAINT api_token_push_limits CHECK (scopes <@ ARRAY['push', 'read'] OR (flows = '{}' AND priority_max IS NULL AND rate IS NULL))
);
CREATE INDEX api_token_name ON penstock.api_token (name, id);
COMMENT ON COLUMN penstock.api_token.applications IS 'to which the token is limited; empty: to none';
COMMENT ON COLUMN penstock.api_token.queues IS 'to which the token is limited; empty: to none';
COMMENT ON COLUMN penstock.api_token.flows IS 'of entries that it may push; empty: any';
COMMENT ON COLUMN penstock.api_token.priority_max IS 'that a push may ask for; null: any. Scopes operate and admin change entries in other ways, so that this and flows would limit nothing';
COMMENT ON COLUMN penstock.api_token.rate IS 'entries a second that it may push, at each leader; null: any';
COMMENT ON COLUMN penstock.api_token.burst IS 'entries that it may push at once; null: as many as in a second, at least one';
COMMENT ON COLUMN penstock.api_token.used_at IS 'within a minute';

-- Samples: the state of each queue every few seconds, written by the elected leader only. Status pages, metrics and the
-- live view read these, so that no page counts a table. measure() counts, once a queue and pass.
CREATE TABLE penstock.sample (
    queue_id       integer NOT NULL,
    at             timestamptz NOT NULL,
    initial        bigint NOT NULL,
    pending        bigint NOT NULL,
    disabled       bigint NOT NULL,
    computing      bigint NOT NULL,
    failed         bigint NOT NULL,
    estimated      boolean NOT NULL,
    serving        integer NOT NULL,
    head_age       double precision,
    blocked        text,
    accepted       bigint NOT NULL,
    gone           bigint NOT NULL,
    dead_tuples    bigint NOT NULL,
    in_per_second  double precision,
    out_per_second double precision,
    PRIMARY KEY (queue_id, at)
) PARTITION BY RANGE (at);
COMMENT ON COLUMN penstock.sample.estimated IS 'some count passed the bound up to which counting is exact';
COMMENT ON COLUMN penstock.sample.head_age IS 'age in seconds of the entry that a node would claim first; null: there is none';
COMMENT ON COLUMN penstock.sample.blocked IS 'why no node claims from the queue, as a code of explain_entry; null: claims are possible';
COMMENT ON COLUMN penstock.sample.accepted IS 'rows inserted into the queue''s table since its statistics began; gone: deleted';
COMMENT ON COLUMN penstock.sample.in_per_second IS 'entries accepted a second since the sample before; out_per_second: gone, which is the drain rate';

-- The same by the minute: depths, rates and serving are means, head_age is the worst, counters are the last.
CREATE TABLE penstock.sample_minute (LIKE penstock.sample INCLUDING ALL) PARTITION BY RANGE (at);

-- Output of runs so far, for people and programs that read it during the run. Rows are only added; a run of a newer
-- token begins again, and the output of older ones is obsolete then. It goes by the hour: sweep_output.
CREATE TABLE penstock.output (
    entry_id bigint NOT NULL,
    token    bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id integer NOT NULL,
    attempt  integer NOT NULL,
    seq      integer NOT NULL,
    data     bytea NOT NULL,
    PRIMARY KEY (queue_id, entry_id, token, seq, at)
) PARTITION BY RANGE (at);

-- Hours are dropped whole; until the first of them is made, and while no node makes them, rows go here.
CREATE TABLE penstock.output_default PARTITION OF penstock.output DEFAULT;
COMMENT ON TABLE penstock.output IS 'output of runs, piece by piece; for a model that streams, whole server-sent events';
COMMENT ON COLUMN penstock.output.seq IS 'pieces of a run are numbered from 1 without gaps';

-- The use of each flow, and its weight. pkg/fairness/doc.go has the order that follows from the two.

-- Service over all nodes in slot-seconds or declared cost, as of a time; half of it is forgotten every half-life. Nodes add
-- the service that they gave, all their flows in one statement every second or two; no push and no claim touches it. A row
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
COMMENT ON COLUMN penstock.usage.service IS 'slot-seconds, or cost where entries declare it, after decay';
COMMENT ON COLUMN penstock.usage.lift IS 'service that was never given: it raised a flow that was away to the level of those that stayed';

-- A flow's share beside other flows, in one queue or, without one, in all; 1 where there is no row.
CREATE TABLE penstock.flow_weight (
    queue_id integer REFERENCES penstock.queue ON DELETE CASCADE,
    weight   real NOT NULL CHECK (weight >= 0.001 AND weight <= 1000),
    flow     text COLLATE "C" NOT NULL
);
CREATE UNIQUE INDEX flow_weight_of ON penstock.flow_weight (flow, coalesce(queue_id, 0));

