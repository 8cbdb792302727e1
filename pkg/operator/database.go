package operator

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// PageMax is how many rows a list returns at most; a limit of zero or less means PageDefault.
const (
	PageDefault = 50
	PageMax     = 10_000
)

// Database is the operator's seat on one database.
type Database struct {
	db postgres.DB
}

// New returns a seat on the database behind db.
func New(db postgres.DB) *Database { return &Database{db: db} }

// page keeps a limit within its bounds.
func page(limit int) int {
	if limit <= 0 {
		return PageDefault
	}
	return min(limit, PageMax)
}

// list collects the rows of a query into structs by column name.
func list[T any](ctx context.Context, db postgres.DB, what, sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", what, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[T])
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", what, err)
	}
	return found, nil
}

// given is nil for a zero value: a condition that nobody asked for.
func given[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}
