-- +goose Up

-- Heartbeats find the lock of an entry by this, and read no table of entries: there is one for each queue.
ALTER TABLE penstock.cancel_request ADD COLUMN lock_key text COLLATE "C";
COMMENT ON COLUMN penstock.cancel_request.lock_key IS 'of the entry; null if it has none';
UPDATE penstock.cancel_request c SET lock_key = e.lock_key FROM penstock.entry e WHERE e.queue_id = c.queue_id AND e.id = c.entry_id;
