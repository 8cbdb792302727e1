-- +goose Up

-- Secrets of receivers do not stand here as they are: sealed under the key of the installation, or a reference to where
-- they are kept (env:NAME, file:/path). Those that were written before stay readable until they are rotated.
ALTER TABLE penstock.webhook_endpoint
    DROP CONSTRAINT webhook_endpoint_secret_check,
    DROP CONSTRAINT webhook_endpoint_old_secret_check,
    ADD CONSTRAINT webhook_endpoint_secret_check CHECK (secret ~ '^(sealed:|env:|file:/|whsec_)'),
    ADD CONSTRAINT webhook_endpoint_old_secret_check CHECK (old_secret ~ '^(sealed:|env:|file:/|whsec_)');
COMMENT ON COLUMN penstock.webhook_endpoint.secret IS 'sealed:... under the key of the installation, or env:NAME or file:/path of whoever delivers';
