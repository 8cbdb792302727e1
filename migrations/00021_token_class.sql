-- +goose Up

-- A token of which only other limits are set keeps the class of its flows. Rows of before keep their class.
ALTER TABLE penstock.gateway_token
    ALTER COLUMN criticality DROP NOT NULL,
    ALTER COLUMN criticality DROP DEFAULT;
COMMENT ON COLUMN penstock.gateway_token.criticality IS
    'at most, in any flow; NULL: that of the flow of the request, else default';
