package operator

import (
	"context"
	"time"
)

// Table is a table of the schema with its size. Partitions are counted with their parent.
type Table struct {
	Name       string     `json:"name"`
	Partitions int64      `json:"partitions"`
	Bytes      int64      `json:"bytes"` // with indexes
	Rows       int64      `json:"rows"`  // estimate of the statistics collector
	Dead       int64      `json:"dead_tuples"`
	VacuumedAt *time.Time `json:"vacuumed_at,omitempty"` // the last time, of any partition
}

// tablesSQL reads the catalog and the cumulative statistics; it opens no table.
const tablesSQL = `
SELECT coalesce(parent.relname, c.relname)::text AS name, count(parent.oid) AS partitions,
       sum(pg_total_relation_size(c.oid))::bigint AS bytes,
       coalesce(sum(penstock.live_rows(c.oid)), 0)::bigint AS rows,
       coalesce(sum(pg_stat_get_dead_tuples(c.oid)), 0)::bigint AS dead,
       max(greatest(pg_stat_get_last_vacuum_time(c.oid),
                    pg_stat_get_last_autovacuum_time(c.oid))) AS vacuumed_at
  FROM pg_class c
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
  LEFT JOIN pg_class parent ON parent.oid = i.inhparent
 WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind = 'r'
 GROUP BY 1
 ORDER BY bytes DESC, name
 LIMIT $1`

// Tables returns the largest tables of the schema.
func (d *Database) Tables(ctx context.Context, limit int) ([]Table, error) {
	return list[Table](ctx, d.db, "tables", tablesSQL, page(limit))
}

// Snapshotted is a session whose snapshot keeps vacuum from removing rows.
type Snapshotted struct {
	PID         int32     `json:"pid"`
	Role        string    `json:"role"`
	Application string    `json:"application"`
	Client      string    `json:"client"`
	State       string    `json:"state"`
	Since       time.Time `json:"since"` // begin of its transaction
}

const snapshotsSQL = `
SELECT a.pid, coalesce(a.usename, '')::text AS role, a.application_name AS application,
       coalesce(host(a.client_addr), 'local') AS client, coalesce(a.state, '') AS state, a.xact_start AS since
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.backend_xmin IS NOT NULL AND a.xact_start IS NOT NULL
   AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start
 LIMIT $1`

// Snapshots returns the sessions with the oldest snapshots.
func (d *Database) Snapshots(ctx context.Context, limit int) ([]Snapshotted, error) {
	return list[Snapshotted](ctx, d.db, "snapshots", snapshotsSQL, page(limit))
}

// Partition is a partition of a table whose old rows are dropped with their partition.
type Partition struct {
	Table   string   `json:"table"`
	Name    string   `json:"name"`
	Bound   string   `json:"bound"` // as Postgres writes it
	Bytes   int64    `json:"bytes"` // with indexes
	Rows    int64    `json:"rows"`  // estimate of the statistics collector
	Default bool     `json:"default"`
	Kept    *float64 `json:"kept_seconds,omitempty"` // the retention of the table
}

// partitionsSQL reads the catalog and the cumulative statistics; it opens no partition. The retentions, which are
// counted over all queues, are read once and not for each partition.
const partitionsSQL = `
WITH kept AS MATERIALIZED (SELECT parent, kept FROM penstock.retention)
SELECT parent.relname::text AS "table", c.relname::text AS name, b.bound, pg_total_relation_size(c.oid) AS bytes,
       coalesce(penstock.live_rows(c.oid), 0) AS rows, b.bound = 'DEFAULT' AS "default",
       extract(epoch FROM k.kept)::float8 AS kept
  FROM pg_class parent
  JOIN pg_inherits i ON i.inhparent = parent.oid
  JOIN pg_class c ON c.oid = i.inhrelid
 CROSS JOIN LATERAL (SELECT pg_get_expr(c.relpartbound, c.oid) AS bound OFFSET 0) b
  LEFT JOIN kept k ON k.parent = parent.relname
 WHERE parent.relnamespace = 'penstock'::regnamespace AND parent.relkind = 'p' AND parent.relname <> 'entry'
 ORDER BY parent.relname, c.relname
 LIMIT $1`

// Partitions returns the partitions of the tables that are dropped by the day or the hour, by table and
// name. Those of entries, one for each queue, are not among them.
func (d *Database) Partitions(ctx context.Context, limit int) ([]Partition, error) {
	return list[Partition](ctx, d.db, "partitions", partitionsSQL, page(limit))
}
