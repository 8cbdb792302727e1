// Package database opens the database of a benchmark.
package database

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
)

// Open migrates the database that dsn names, or one of a private durable server if it is empty. closeAll ends what Open
// began.
func Open(ctx context.Context, dsn string, conns int32) (pool *pgxpool.Pool, closeAll func(), err error) {
	var server *devpostgres.Server
	closeAll = func() {
		if pool != nil {
			pool.Close()
		}
		if server != nil {
			_ = server.Stop(context.WithoutCancel(ctx)) // the run is over
		}
	}
	if dsn == "" {
		if server, err = devpostgres.Start(ctx, devpostgres.Config{}); err != nil {
			return nil, nil, err
		}
		dsn = server.ConnString()
	}
	pool, err = postgres.Open(ctx, postgres.Config{DSN: dsn, MaxConns: conns})
	if err == nil {
		_, err = migrations.Up(ctx, pool.Config().ConnConfig)
	}
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	return pool, closeAll, nil
}
