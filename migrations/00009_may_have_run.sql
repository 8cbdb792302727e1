-- +goose Up

ALTER TABLE penstock.entry ADD COLUMN may_have_run boolean;
COMMENT ON COLUMN penstock.entry.may_have_run IS 'recovery or an operator ended a lock of it under which a run may have begun; null is false';
