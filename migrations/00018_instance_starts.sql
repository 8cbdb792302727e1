-- +goose Up

-- How long a start took is known only where it was followed from its beginning; of instances of before it is not known.
-- How long an announcement holds decides for how long others may not have been heard.
ALTER TABLE penstock.instance
    ADD COLUMN began_at timestamptz,
    ADD COLUMN time_to_live interval;
COMMENT ON COLUMN penstock.instance.began_at IS 'when its start began, where the start was followed from then on; null: how long it took is not known';
COMMENT ON COLUMN penstock.instance.time_to_live IS 'of one that announced itself: how long its last announcement holds';
