-- +goose Up

-- Recovery counts the crash of a group for the entry that ran.
ALTER TABLE penstock.node ADD COLUMN running_entries bigint[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN penstock.node.running_entries IS 'the entries that run under the tokens of running, in their order; empty of a program that does not tell';
