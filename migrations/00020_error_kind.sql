-- +goose Up

-- The kind of an error decides what follows from it. Its message, which may have the words of a webhook or of a backend
-- in it, is for people alone.
ALTER TABLE penstock.deployment_state
    ADD COLUMN error_kind text NOT NULL DEFAULT '' CHECK (error_kind IN ('', 'start', 'no room'));
COMMENT ON COLUMN penstock.deployment_state.error_kind IS 'start: an instance ended by itself; no room: its backend had none for one instance more; empty: any other error, or none';
UPDATE penstock.deployment_state
   SET error_kind = CASE WHEN starts_with(error, 'start failed: ') THEN 'start' ELSE 'no room' END
 WHERE starts_with(error, 'start failed: ') OR strpos(error, 'there is no room for one more instance') > 0;
