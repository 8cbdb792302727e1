-- +goose Up

-- Who leads. Rules and their reasons: pkg/election/doc.go.

-- Terms, over all elections: a new term is larger than any before it, whatever was deleted from the table.
CREATE SEQUENCE penstock.term_seq AS bigint CACHE 1;

-- One row for each election. A new term is a new value of a unique column: taking over needs the row for itself
-- and so excludes whoever holds it FOR KEY SHARE (holds_term); renewing does not.
CREATE TABLE penstock.leader (
    name        text COLLATE "C" PRIMARY KEY,
    term        bigint NOT NULL UNIQUE DEFAULT nextval('penstock.term_seq'),
    incarnation bigint NOT NULL DEFAULT 0,
    holder      text NOT NULL DEFAULT '',
    lease       interval NOT NULL DEFAULT '4 seconds' CHECK (lease > '0'),
    changes     bigint NOT NULL DEFAULT 0,
    elected_at  timestamptz,
    renewed_at  timestamptz
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.leader.renewed_at IS 'the term ends one lease later; null: its holder has resigned';
COMMENT ON COLUMN penstock.leader.changes IS 'terms so far';

-- holds_term says whether the term is the newest of its election and its lease has not lapsed. If so, it stays the
-- newest until this transaction ends: a take-over waits. Statements of elected duties name it:
--   UPDATE ... WHERE (SELECT penstock.holds_term(17)) AND ...
-- +goose StatementBegin
CREATE FUNCTION penstock.holds_term(number bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.leader WHERE term = number AND renewed_at + lease > clock_timestamp() FOR KEY SHARE;
    RETURN FOUND;
END $$;
-- +goose StatementEnd
