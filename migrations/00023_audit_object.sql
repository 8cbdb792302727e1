-- +goose Up

-- The page of a queue, and explain of a disabled entry, read the changes of one object.
CREATE INDEX audit_object ON penstock.audit (object, id);
