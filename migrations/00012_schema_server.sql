-- +goose Up

-- The texts of the catalog depend on the major version that prints them.
ALTER TABLE penstock.schema_version ADD COLUMN server_major integer;
COMMENT ON COLUMN penstock.schema_version.server_major IS 'the major version of Postgres whose catalog schema_object has, in the newest row. NULL: recorded by a program that did not keep it';
