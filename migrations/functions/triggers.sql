-- Triggers. CREATE OR REPLACE TRIGGER waits for writers of the table, so that this file is applied only when it
-- has changed. A trigger that is no longer here is dropped by a numbered migration. The locks and SQLSTATEs of a
-- trigger are in the head of its function.

-- model_version: nodes read models again after any change of one.
CREATE OR REPLACE TRIGGER model_version AFTER INSERT OR UPDATE OR DELETE ON penstock.model
    FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();

-- instance_version: nodes read instances again when one is registered or removed.
CREATE OR REPLACE TRIGGER instance_version AFTER INSERT OR DELETE ON penstock.instance
    FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();

-- instance_change: nodes read instances again after a change that decides about calls. Load and the time of a check
-- change all the time and are left out; so is the change between ready and busy, both of which take calls.
CREATE OR REPLACE TRIGGER instance_change AFTER UPDATE ON penstock.instance
    FOR EACH ROW WHEN (OLD.endpoint IS DISTINCT FROM NEW.endpoint
          OR OLD.server IS DISTINCT FROM NEW.server
          OR OLD.slots IS DISTINCT FROM NEW.slots
          OR OLD.labels IS DISTINCT FROM NEW.labels
          OR CASE OLD.state WHEN 'busy' THEN 'ready' ELSE OLD.state END
             IS DISTINCT FROM CASE NEW.state WHEN 'busy' THEN 'ready' ELSE NEW.state END
          OR OLD.draining_at IS DISTINCT FROM NEW.draining_at
          OR OLD.quarantined_until IS DISTINCT FROM NEW.quarantined_until)
    EXECUTE FUNCTION penstock.bump_inference_version();

-- instance_ready notes how long the start of an instance of a deployment took.
CREATE OR REPLACE TRIGGER instance_ready BEFORE UPDATE OF state ON penstock.instance
    FOR EACH ROW WHEN (NEW.deployment IS NOT NULL AND OLD.ready_at IS NULL AND NEW.state IN ('ready', 'busy'))
    EXECUTE FUNCTION penstock.note_ready();

-- queue_model: nodes read models again when a queue gets another model.
CREATE OR REPLACE TRIGGER queue_model AFTER UPDATE OF model ON penstock.queue
    FOR EACH ROW WHEN (OLD.model IS DISTINCT FROM NEW.model) EXECUTE FUNCTION penstock.bump_inference_version();

-- limit_own_concurrency keeps the limit of a queue's own max_concurrent.
CREATE OR REPLACE TRIGGER limit_own_concurrency AFTER UPDATE OF max_concurrent ON penstock.queue
    FOR EACH ROW WHEN (OLD.max_concurrent IS DISTINCT FROM NEW.max_concurrent)
    EXECUTE FUNCTION penstock.limit_own_concurrency();

-- drop_own_limit removes that limit with its queue.
CREATE OR REPLACE TRIGGER drop_own_limit AFTER DELETE ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.drop_own_limit();

-- keep_watch_queue refuses to drop a queue that records changes of a table.
CREATE OR REPLACE TRIGGER keep_watch_queue BEFORE DELETE ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.keep_watch_queue();

-- keep_completions makes open batches end as failed whose completion queue is dropped.
CREATE OR REPLACE TRIGGER keep_completions BEFORE DELETE ON penstock.queue
    FOR EACH ROW EXECUTE FUNCTION penstock.keep_completions();

-- follow_quota puts a queue under the quota of its application.
CREATE OR REPLACE TRIGGER follow_quota AFTER INSERT OR UPDATE OF application ON penstock.queue
    FOR EACH ROW EXECUTE FUNCTION penstock.follow_quota();

-- audit_stays refuses every change of rows of the audit.
CREATE OR REPLACE TRIGGER audit_stays BEFORE UPDATE OR TRUNCATE ON penstock.audit
    FOR EACH STATEMENT EXECUTE FUNCTION penstock.keep_audit();

-- audit_goes_by_retention refuses to delete rows of the audit but by prune_audit, and those of the last 30 days always.
CREATE OR REPLACE TRIGGER audit_goes_by_retention BEFORE DELETE ON penstock.audit FOR EACH ROW
    WHEN (OLD.at > clock_timestamp() - interval '30 days' OR current_setting('penstock.pruning', true) IS DISTINCT
          FROM 'audit')
    EXECUTE FUNCTION penstock.keep_audit();

-- count_again: the next claim counts a limit whose numbers have changed.
CREATE OR REPLACE TRIGGER count_again BEFORE UPDATE ON penstock."limit" FOR EACH ROW
    WHEN (OLD.max_units IS DISTINCT FROM NEW.max_units OR OLD.rate IS DISTINCT FROM NEW.rate OR OLD.burst IS DISTINCT
          FROM NEW.burst
          OR OLD.per_flow IS DISTINCT FROM NEW.per_flow OR OLD.per_key IS DISTINCT FROM NEW.per_key)
    EXECUTE FUNCTION penstock.count_again();

-- count_again: the next claim counts a limit that a queue has come under, or uses with other units.
CREATE OR REPLACE TRIGGER count_again AFTER INSERT
    OR UPDATE ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.count_again();

-- drop_firings deletes the firings of cron jobs that are deleted.
CREATE OR REPLACE TRIGGER drop_firings AFTER DELETE ON penstock.cron_job REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION penstock.drop_firings();

-- check_queue refuses settings of a queue that are out of range.
CREATE OR REPLACE TRIGGER check_queue BEFORE INSERT OR UPDATE OF
    priority, entry_priority, algorithm, merge, "grouping", application, max_concurrent, max_concurrent_per_node,
    max_concurrent_per_name, max_weight, shards, mergeable, capacity, crash_limit, quantum_count, quantum_time,
    run_timeout, start_within, finish_within, payload_limit, result_retention, failure_retention, retry, lapse, needs,
    on_failure, capacity_per_flow, capacity_per_slot, on_no_instance, no_instance_timeout, model
    ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.check_queue();

-- before_weights locks the limits before a change of max_weight locks the queue.
CREATE OR REPLACE TRIGGER before_weights BEFORE UPDATE OF max_weight ON penstock.queue FOR EACH STATEMENT EXECUTE FUNCTION penstock.before_weights();

-- mark_weighed: claims under limits read weights from now on, and for good: entries keep theirs.
CREATE OR REPLACE TRIGGER mark_weighed BEFORE INSERT OR UPDATE OF max_weight ON penstock.queue
    FOR EACH ROW WHEN (NEW.max_weight > 1 AND NOT NEW.weighed) EXECUTE FUNCTION penstock.mark_weighed();

-- keep_webhook_queue refuses settings with which the queue of callbacks would not take every callback.
CREATE OR REPLACE TRIGGER keep_webhook_queue BEFORE UPDATE OF kind, capacity, capacity_per_flow, "grouping",
    payload_limit, model ON penstock.queue
    FOR EACH ROW WHEN (OLD.name = 'webhook' AND OLD.kind = 'webhook') EXECUTE FUNCTION penstock.keep_webhook_queue();

-- keep_webhook_queue_there refuses to drop the queue of callbacks.
CREATE OR REPLACE TRIGGER keep_webhook_queue_there BEFORE DELETE ON penstock.queue
    FOR EACH ROW WHEN (OLD.name = 'webhook') EXECUTE FUNCTION penstock.keep_webhook_queue();

-- keep_queue_kind refuses a change of the kind of a queue that cron jobs, watches or batches need.
CREATE OR REPLACE TRIGGER keep_queue_kind BEFORE UPDATE OF kind ON penstock.queue FOR EACH ROW
    WHEN (OLD.kind IS DISTINCT FROM NEW.kind) EXECUTE FUNCTION penstock.keep_queue_kind();

-- await_claims waits for claims that do not know that their queue comes under the limit.
CREATE OR REPLACE TRIGGER await_claims BEFORE INSERT ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.await_claims();

-- pruning_is_recorded adds a row to the audit for rows that were deleted from it.
CREATE OR REPLACE TRIGGER pruning_is_recorded AFTER DELETE ON penstock.audit REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION penstock.record_pruning();
