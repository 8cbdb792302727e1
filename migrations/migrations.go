// Package migrations holds the schema's history and applies it.
// Migrations are forward-only and short-locking; the programs of the version before and after each one run on it.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed [0-9]*.sql
var files embed.FS

// Table is where goose records what was applied. It lives outside the schema penstock, which the first migration creates.
const Table = "public.penstock_migration"

// A statement that waits for a table makes everybody behind it wait. So a migration gives up after lockWait, lets the others
// pass for lockPause, and tries again for lockPatience.
const (
	lockWait     = 2 * time.Second
	lockPause    = 3 * time.Second
	lockPatience = 2 * time.Minute
)

// Up applies every migration that is missing on the database behind cfg and returns how many it applied.
// Two calls at once are safe: the second waits for the first, at most a minute. Where a table is held by somebody else for two
// minutes, or until ctx ends, the error says by whom.
func Up(ctx context.Context, cfg *pgx.ConnConfig) (int, error) {
	provider, db, err := open(cfg)
	if err != nil {
		return 0, err
	}
	defer db.Close()
	applied := 0
	for began := time.Now(); ; {
		results, err := provider.Up(ctx)
		var partial *goose.PartialError
		if errors.As(err, &partial) {
			results = partial.Applied
		}
		applied += len(results)
		var pg *pgconn.PgError
		if err == nil {
			return applied, nil
		}
		if !errors.As(err, &pg) || pg.Code != lockNotAvailable {
			return applied, fmt.Errorf("apply migrations: %w", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(lockPause):
			if time.Since(began) < lockPatience {
				continue
			}
		}
		return applied, fmt.Errorf("apply migrations: a table was held for %s by %s: %w", time.Since(began).Round(time.Second), holder(ctx, db), err)
	}
}

const lockNotAvailable = "55P03"

// holderSQL names the oldest transaction that has held tables of ours for longer than a migration waits.
const holderSQL = `
SELECT format('process %s (user %s, program "%s", %s since %s), which has %s; end it with SELECT pg_terminate_backend(%s), or wait for it, and start again',
              a.pid, a.usename, a.application_name, a.state, a.xact_start, string_agg(DISTINCT c.oid::regclass::text, ', '), a.pid)
  FROM pg_stat_activity a
  JOIN pg_locks l ON l.pid = a.pid AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  JOIN pg_class c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
 WHERE a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - $1 * interval '1 millisecond'
   AND (c.relnamespace = to_regnamespace('penstock') OR c.oid = to_regclass($2))
 GROUP BY a.pid, a.usename, a.application_name, a.state, a.xact_start ORDER BY a.xact_start LIMIT 1`

// holder says who is in the way; nobody is found who has just let go.
func holder(ctx context.Context, db *sql.DB) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lockWait)
	defer cancel()
	who := "transactions that have ended; start again"
	_ = db.QueryRowContext(ctx, holderSQL, lockWait.Milliseconds(), Table).Scan(&who)
	return who
}

// SQL returns the text of one migration file, for those who apply migrations with a tool of their own.
func SQL(name string) (string, error) {
	text, err := files.ReadFile(name)
	if err != nil {
		return "", fmt.Errorf("read migration %q: %w", name, err)
	}
	return string(text), nil
}

func open(cfg *pgx.ConnConfig) (*goose.Provider, *sql.DB, error) {
	db := stdlib.OpenDB(*cfg, stdlib.OptionAfterConnect(func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d", lockWait.Milliseconds()))
		return err
	}))
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 60))
	if err != nil {
		db.Close()
		return nil, nil, fmt.Errorf("prepare migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithSessionLocker(locker), goose.WithTableName(Table))
	if err != nil {
		db.Close()
		return nil, nil, fmt.Errorf("read migrations: %w", err)
	}
	return provider, db, nil
}
