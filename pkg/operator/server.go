package operator

import (
	"context"
	"fmt"
	"time"
)

// Server is the state of the database server that matters to the queue.
type Server struct {
	Connections    int     `json:"connections"`
	MaxConnections int     `json:"max_connections"`
	HorizonSeconds float64 `json:"horizon_seconds"` // age of the oldest transaction that keeps vacuum from cleaning
	NotifyUsage    float64 `json:"notify_usage"`    // of the notification queue, 0 to 1
	DeadTuples     int64   `json:"dead_tuples"`     // of ready and lock
}

const serverSQL = `
SELECT clock_timestamp(), connections, max_connections, horizon_age, notify_usage, dead_tuples
  FROM penstock.server_status`

// ServerState is the server with its version, and the schema's.
type ServerState struct {
	Server
	Version   string     `json:"version"`
	StartedAt time.Time  `json:"started_at"`
	Bytes     int64      `json:"bytes"`     // of the whole database
	Functions string     `json:"functions"` // hash of the schema's functions
	AppliedAt *time.Time `json:"applied_at,omitempty"`
}

const serverStateSQL = `
SELECT s.connections, s.max_connections, s.horizon_age, s.notify_usage, s.dead_tuples,
       current_setting('server_version'), pg_postmaster_start_time(), pg_database_size(current_database()),
       coalesce(v.hash, ''), v.applied_at
  FROM penstock.server_status s
  LEFT JOIN LATERAL (SELECT left(hash, 12) AS hash, applied_at
                       FROM penstock.schema_version ORDER BY id DESC LIMIT 1) v ON true`

// ServerState returns the state of the server and of the schema.
func (d *Database) ServerState(ctx context.Context) (ServerState, error) {
	var s ServerState
	err := d.db.QueryRow(ctx, serverStateSQL).Scan(&s.Connections, &s.MaxConnections, &s.HorizonSeconds,
		&s.NotifyUsage,
		&s.DeadTuples, &s.Version, &s.StartedAt, &s.Bytes, &s.Functions, &s.AppliedAt)
	if err != nil {
		return s, fmt.Errorf("read the server's state: %w", err)
	}
	return s, nil
}

// Writable reports whether the database takes writes. A standby answers queries, too, and would look healthy.
func (d *Database) Writable(ctx context.Context) (writable bool, err error) {
	const sql = `SELECT NOT pg_is_in_recovery() AND current_setting('default_transaction_read_only') = 'off'`
	if err := d.db.QueryRow(ctx, sql).Scan(&writable); err != nil {
		return false, fmt.Errorf("ask whether the database takes writes: %w", err)
	}
	return writable, nil
}
