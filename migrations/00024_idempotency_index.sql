-- +goose Up

-- Keys for idempotent pushes are deleted page by page: no statement reads this index. Where 00023 of a build of
-- November 2026 has dropped it, there is none.
DROP INDEX IF EXISTS penstock.idempotency_created_at;
