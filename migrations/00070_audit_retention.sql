-- +goose Up

-- What was done stays written. Who owns the table can take the triggers away, which no trigger can hinder; nobody else can
-- change anything, nor delete what is younger than 30 days, and what is older goes by prune_audit alone.
DROP TRIGGER audit_stays ON penstock.audit;
CREATE TRIGGER audit_stays BEFORE UPDATE OR TRUNCATE ON penstock.audit FOR EACH STATEMENT EXECUTE FUNCTION penstock.keep_audit();
CREATE TRIGGER audit_goes_by_retention BEFORE DELETE ON penstock.audit FOR EACH ROW
    WHEN (OLD.at > clock_timestamp() - interval '30 days' OR current_setting('penstock.pruning', true) IS DISTINCT FROM 'audit')
    EXECUTE FUNCTION penstock.keep_audit();

-- prune_audit deletes up to some rows of whole days that are older than keep, which is 30 days at least, and says so in the
-- audit; it returns how many. Rows are in order of id as good as of time.
-- +goose StatementBegin
CREATE FUNCTION penstock.prune_audit(keep interval, most integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    before timestamptz := date_trunc('day', clock_timestamp() - greatest(keep, interval '30 days'), 'UTC');
    gone   bigint;
BEGIN
    PERFORM set_config('penstock.pruning', 'audit', true);
    DELETE FROM penstock.audit a
     WHERE a.id = ANY (ARRAY(SELECT x.id FROM (SELECT o.id, o.at FROM penstock.audit o ORDER BY o.id LIMIT most) x WHERE x.at < before));
    GET DIAGNOSTICS gone = ROW_COUNT;
    PERFORM set_config('penstock.pruning', '', true);
    IF gone > 0 THEN
        INSERT INTO penstock.audit (actor, verb, object, reason, detail)
        VALUES ('leader', 'prune_audit', 'audit', 'retention', jsonb_build_object('rows', gone, 'before', before));
    END IF;
    RETURN gone;
END $$;
-- +goose StatementEnd
