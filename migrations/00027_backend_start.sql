-- +goose Up

-- A pod of a StatefulSet has the name of the one before it. The clock of a cluster, by which its start is timed, need not
-- be the database's: whether a start is the one that was registered is told by its time as the backend gave it.
ALTER TABLE penstock.instance ADD COLUMN backend_began_at timestamptz;
COMMENT ON COLUMN penstock.instance.backend_began_at IS 'when its start began, by the clock of the backend that reported it, to be compared with times of that backend alone; null: none reported it, or a leader of an earlier version registered it';
