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

-- The brake of pushes, see functions/brake.sql. It is of no version: nodes need not know it.
ALTER TABLE penstock.queue ADD COLUMN refusal jsonb;
COMMENT ON COLUMN penstock.queue.refusal IS 'why pushes are refused for now: reason storage with a text, or depth with capacity and release; null: they are not. The elected leader sets it';

-- Scope announce, and what the calls of a token's flows may take.
ALTER TABLE penstock.api_token DROP CONSTRAINT IF EXISTS api_token_scopes_check, DROP CONSTRAINT IF EXISTS api_token_push_limits;
ALTER TABLE penstock.api_token
    ADD COLUMN gpu_ms bigint CHECK (gpu_ms > 0),
    ADD COLUMN gpu_period text COLLATE "C" CHECK (gpu_period IN ('hour', 'day')),
    ADD CONSTRAINT api_token_scopes_check
        CHECK (cardinality(scopes) > 0 AND scopes <@ ARRAY['push', 'read', 'operate', 'admin', 'call', 'announce']),
    ADD CONSTRAINT api_token_push_limits
        CHECK (scopes <@ ARRAY['push', 'read', 'call', 'announce'] OR (flows = '{}' AND priority_max IS NULL AND rate IS NULL)),
    ADD CONSTRAINT api_token_budget
        CHECK ((gpu_ms IS NULL) = (gpu_period IS NULL) AND (gpu_ms IS NULL OR flows <> '{}'));
COMMENT ON COLUMN penstock.api_token.gpu_ms IS 'milliseconds of GPU that the calls of its flows may take in a gpu_period; beyond, its pushes are refused. null: any';
COMMENT ON COLUMN penstock.api_token.gpu_period IS 'hour or day, which begin when those of UTC do';
