-- +goose Up

-- The autoscaler asks how long calls keep a slot, which gpu_ms does not tell: programs of the version before leave 0 here, by
-- which it reads what they recorded as it was.
ALTER TABLE penstock.usage_hour ADD COLUMN extra_ms bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN penstock.usage_hour.extra_ms IS 'of gpu_ms, what is beyond the time that slots were busy: of further GPUs and sequences';
COMMENT ON COLUMN penstock.usage_hour.gpu_ms IS 'milliseconds that slots were busy, times the GPUs of their instance and the sequences of a generation; a batch''s is divided among its entries';
