// Package penstock opens the database for a program that pushes entries or handles them in its own process.
//
// The queue is package invalidation: a Definition has the name of a queue and the type of its payloads, and pushes
// them. Package tasknode runs handlers. Both take the pools of Open and no other: their statements rely on the settings
// of these sessions. docs/first-steps.md has a whole program, examples/greeting.
//
//	db, err := penstock.Open(ctx, penstock.Config{URL: os.Getenv("PENSTOCK_DATABASE_URL")})
//	...
//	pushed, err := greetings.Push(ctx, db.Pool, Greeting{Name: "Ann"})
//
// A push may also be part of a transaction of the program's own, on a pool of its own: Definition.Push takes it in
// place of the pool, and invalidation.PushSQLTx takes one of database/sql. The schema is that of package migrations,
// which `penstock migrate up` and leaders apply.
package penstock

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
)

const (
	// poolConns is enough for a task node with any number of threads: claims and endings are batches.
	poolConns = 4
	// connsMax is beyond the max_connections of any server.
	connsMax = 10_000
	// beatConns exceeds the one connection that heartbeats use at a time: frozen ones count until they are closed.
	beatConns = 10
	// statementTimeout is for statements that name no time of their own.
	statementTimeout = 30 * time.Second
)

// Config is the address of the database and the bounds of the connections. The zero Config connects where the
// variables of libpq (PGHOST, PGUSER and so on) say.
type Config struct {
	URL string // postgres://user:password@host/name, or libpq's key=value pairs
	// MaxConns bounds DB.Pool; 4 if zero. A program that pushes from many goroutines by a handle (Definition.Open,
	// Queue.Push) needs no more, because pushes that arrive together share a statement. A pool_max_conns in URL has no
	// effect.
	MaxConns int
	// Pooled is for a pooler in transaction mode before Postgres. Sessions then have the settings of the role: a task
	// node logs the statements for those that the role lacks.
	Pooled bool
	// DirectURL is the address of Postgres itself where Pooled is set, for DB.Listen.
	DirectURL string
	// StatementTimeout bounds each statement of DB.Pool; 30 s if zero, none if negative. With Pooled the server does
	// not know it: 5 s after it the connection is closed, and the server may still carry the statement out.
	StatementTimeout time.Duration
}

// DB is the connections of a program. Its pools connect when they are first used, and again after a loss.
type DB struct {
	// Pool is for pushes, and for the claims and endings of a task node.
	Pool *pgxpool.Pool
	// Beats is for the heartbeats of a task node: nothing else can hold them up.
	Beats *pgxpool.Pool
	// Listen is for invalidation.ListenConfig.Conn; nil behind a pooler without DirectURL. Without a listener a node
	// finds work by polling.
	Listen *pgx.ConnConfig
}

// Open returns pools whose sessions have the settings on which the statements of Penstock rely. These settings do not
// suit other statements: sequential scans and joins by hash or merge are priced out, search_path has no public, and
// plans are generic. So a program keeps a pool of its own for its own tables.
//
// Open does not connect; an error is one of the address. Close the DB after the node's Run has returned.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	timeout := max(0, cmp.Or(cfg.StatementTimeout, statementTimeout))
	conns := int32(min(max(0, cfg.MaxConns), connsMax))
	listen, err := cfg.ListenConn()
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, postgres.Config{
		DSN: cfg.URL, MaxConns: cmp.Or(conns, poolConns), Pooled: cfg.Pooled, StatementTimeout: timeout,
	})
	if err != nil {
		return nil, err
	}
	beats, err := postgres.Open(ctx, postgres.Config{DSN: cfg.URL, MaxConns: beatConns, Pooled: cfg.Pooled})
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &DB{Pool: pool, Beats: beats, Listen: listen}, nil
}

// Close closes the pools. It waits for connections that are in use.
func (db *DB) Close() {
	db.Pool.Close()
	db.Beats.Close()
}

// ListenConn returns the configuration of the connection that DB.Listen describes, for a program that needs no pools.
func (c Config) ListenConn() (*pgx.ConnConfig, error) {
	if c.Pooled && c.DirectURL == "" {
		return nil, nil
	}
	conn, err := postgres.ConnConfig(postgres.Config{DSN: cmp.Or(c.DirectURL, c.URL)})
	if err != nil {
		return nil, fmt.Errorf("address for hints: %w", err)
	}
	return conn, nil
}
