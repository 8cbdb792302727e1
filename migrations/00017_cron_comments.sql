-- +goose Up

-- A run drops no nominal time that had fallen due before it began, and is not cancelled for one.
COMMENT ON COLUMN penstock.cron_job.catching_up_to IS 'when the last run began, or one before it: the nominal times that had fallen due by then and are not handled are left to catch_up';
COMMENT ON COLUMN penstock.cron_job.following_at IS 'when the running entry is to be cancelled, since the next nominal time falls due; infinity: the engine has yet to compute it';
