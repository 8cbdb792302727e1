-- +goose Up

-- Which database role has the rights of which duty: written by penstock.grant_duty, read whenever functions are applied,
-- so that a role keeps its rights over upgrades. Roles belong to the whole cluster and rights to one database, hence a
-- row in each database that a role works on.
CREATE TABLE penstock.database_role (
    role       name COLLATE "C" PRIMARY KEY,
    duty       text NOT NULL CHECK (duty IN ('leader', 'node', 'gateway', 'operator', 'push', 'read')),
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN penstock.database_role.duty IS 'the rights of each duty are those of penstock.duty_rights and penstock.duty_functions';
