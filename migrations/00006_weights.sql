-- +goose Up

-- Weights of entries: one of weight w takes w times the units of each limit of its queue while it runs.
ALTER TABLE penstock.queue
    ADD COLUMN max_weight integer NOT NULL DEFAULT 1 CHECK (max_weight BETWEEN 1 AND 1000),
    ADD COLUMN weighed boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.queue.max_weight IS 'the largest weight with which entries may be pushed';
COMMENT ON COLUMN penstock.queue.weighed IS 'max_weight has been above 1: entries and failures may have weights, and claims under limits read them';
ALTER TABLE penstock.limit_use ADD COLUMN weighed boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.limit_use.weighed IS 'as of the queue, for claims';

ALTER TABLE penstock.entry ADD COLUMN weight smallint;
COMMENT ON COLUMN penstock.entry.weight IS 'units that it takes for each unit of a limit; null is 1';
ALTER TABLE penstock.failure ADD COLUMN weight smallint;
ALTER TABLE penstock.lock ADD COLUMN weight smallint NOT NULL DEFAULT 1;
COMMENT ON COLUMN penstock.lock.weight IS 'the largest weight of the entries that it covers, which run one after another';

-- Lanes that wait for units of a limit. Written by claims that have a limit of the queue exclusively, see lane_headroom.
CREATE TABLE penstock.limit_wait (
    since    timestamptz NOT NULL,
    until    timestamptz NOT NULL,
    queue_id integer NOT NULL,
    weight   integer NOT NULL,
    priority smallint NOT NULL,
    flow     text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue_id, priority, flow)
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.limit_wait.until IS 'units are kept for the lane until then; each claim that finds too few moves it on';
COMMENT ON COLUMN penstock.limit_wait.weight IS 'of the first ready entry of the lane';
