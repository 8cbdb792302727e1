-- +goose Up

-- The use of a queue belongs to the application that it had then, also when it has been dropped. Programs of the version
-- before leave NULL here.
ALTER TABLE penstock.usage_hour ADD COLUMN application text COLLATE "C";
COMMENT ON COLUMN penstock.usage_hour.application IS
    'of the queue when use was last added; NULL: recorded by a program of before, or only after the queue was dropped';

-- The time of a run that ended while no node followed it.
ALTER TABLE penstock.remote_run ADD COLUMN reported_at timestamptz;
COMMENT ON COLUMN penstock.remote_run.reported_at IS 'when report came; NULL: there is none, or a program of before took it';

COMMENT ON COLUMN penstock.sample.head_age IS
    'the longest wait in seconds of an entry that is first in its lane, of the queue''s entry_priority or above, and in no paused flow; NULL: there is none';
COMMENT ON COLUMN penstock.sample_minute.head_age IS
    'the longest wait in seconds of an entry that is first in its lane, of the queue''s entry_priority or above, and in no paused flow; NULL: there is none';
