-- +goose Up

-- The page of a queue, and explain of a disabled entry, read the changes of one object. Keys for idempotent pushes are
-- deleted page by page: no statement reads this index.
CREATE INDEX audit_object ON penstock.audit (object, id);
DROP INDEX penstock.idempotency_created_at;
