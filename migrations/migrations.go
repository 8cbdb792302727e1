// Package migrations holds the schema's history and applies it.
// Migrations are forward-only and short-locking; the programs of the version before and after each one run on it.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed [0-9]*.sql
var files embed.FS

// Table is where goose records what was applied. It lives outside the schema penstock, which the first migration creates.
const Table = "public.penstock_migration"

// Up applies every migration that is missing on the database behind cfg and returns how many it applied.
// Two calls at once are safe: the second waits for the first, at most a minute.
func Up(ctx context.Context, cfg *pgx.ConnConfig) (int, error) {
	provider, db, err := open(cfg)
	if err != nil {
		return 0, err
	}
	defer db.Close()
	results, err := provider.Up(ctx)
	if err != nil {
		return len(results), fmt.Errorf("apply migrations: %w", err)
	}
	return len(results), nil
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
	db := stdlib.OpenDB(*cfg)
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
