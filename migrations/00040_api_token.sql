-- +goose Up

-- Who may do what over HTTP. A secret is seen once, by whoever makes it; here is only its SHA-256, which is enough for
-- 256 random bits. Rows of one name are one identity: a rotation adds a row and lets the older ones run out.
CREATE TABLE penstock.api_token (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text COLLATE "C" NOT NULL CHECK (name ~ '^[a-zA-Z0-9][a-zA-Z0-9._@-]{0,62}$'),
    hash         bytea NOT NULL UNIQUE CHECK (length(hash) = 32),
    scopes       text[] NOT NULL CHECK (cardinality(scopes) > 0 AND scopes <@ ARRAY['push', 'read', 'operate', 'admin']),
    applications text[] NOT NULL DEFAULT '{}',
    queues       text[] NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text NOT NULL,
    expires_at   timestamptz,
    revoked_at   timestamptz,
    used_at      timestamptz
);
CREATE INDEX api_token_name ON penstock.api_token (name, id);
COMMENT ON COLUMN penstock.api_token.applications IS 'to which the token is limited; empty: to none';
COMMENT ON COLUMN penstock.api_token.queues IS 'to which the token is limited; empty: to none';
COMMENT ON COLUMN penstock.api_token.used_at IS 'within a minute';

-- What was done stays written. An owner of the table can still take the trigger away, which no trigger can hinder.
-- +goose StatementBegin
CREATE FUNCTION penstock.keep_audit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit is only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$;
-- +goose StatementEnd
CREATE TRIGGER audit_stays BEFORE UPDATE OR DELETE OR TRUNCATE ON penstock.audit FOR EACH STATEMENT EXECUTE FUNCTION penstock.keep_audit();
