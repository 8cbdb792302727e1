-- +goose Up

-- Which entry of the queue of callbacks reports the end of an entry. Dropped by the day.
CREATE TABLE penstock.callback_sent (
    entry_id    bigint NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    callback_id bigint NOT NULL,
    PRIMARY KEY (entry_id, at)
) PARTITION BY RANGE (at);
CREATE TABLE penstock.callback_sent_default PARTITION OF penstock.callback_sent DEFAULT;
COMMENT ON COLUMN penstock.callback_sent.callback_id IS 'entry of the queue webhook; an entry that is retried ends more than once';
