-- What the leader does for nodes that are gone, and its own term.

-- holds_term says whether the term is the newest of its election and its lease has not lapsed. If so, it stays the
-- newest until this transaction ends: a take-over waits. Statements of elected duties name it:
--   UPDATE ... WHERE (SELECT penstock.holds_term(17)) AND ...
CREATE OR REPLACE FUNCTION penstock.holds_term(number bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.leader WHERE term = number AND renewed_at + lease > clock_timestamp() FOR KEY SHARE;
    RETURN FOUND;
END $$;

-- node_lives says whether a node's lease has not lapsed.
CREATE OR REPLACE FUNCTION penstock.node_lives(bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.node n WHERE n.id = $1 AND n.beat_at + n.lease > clock_timestamp())
$$;
