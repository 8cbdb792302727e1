package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// PageMax is how many rows a list returns at most; a limit of zero or less means PageDefault.
const (
	PageDefault = 50
	PageMax     = 10_000
)

// Database runs the functions of operators on one database.
type Database struct {
	db postgres.DB
}

// New returns the functions of operators on the database behind db.
func New(db postgres.DB) *Database { return &Database{db: db} }

// page returns a limit within its bounds.
func page(limit int) int {
	if limit <= 0 {
		return PageDefault
	}
	return min(limit, PageMax)
}

// list collects the rows of a query into structs by column name.
func list[T any](ctx context.Context, db postgres.DB, what, sql string, args ...any) ([]T, error) {
	found, err := pgx.CollectRows(postgres.Query(ctx, db, sql, args...), pgx.RowToStructByName[T])
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", what, err)
	}
	return found, nil
}

// show returns the only row of a query, or the error absent if there is none.
func show[T any](ctx context.Context, db postgres.DB, what string, absent error, sql string, args ...any) (T, error) {
	found, err := pgx.CollectExactlyOneRow(postgres.Query(ctx, db, sql, args...), pgx.RowToStructByName[T])
	if errors.Is(err, pgx.ErrNoRows) {
		err = absent
	}
	if err != nil {
		return found, fmt.Errorf("show %s: %w", what, err)
	}
	return found, nil
}

// change calls a function of the schema with the reason as $1, the actor (null: the database user) as $2, and the rest.
func (d *Database) change(ctx context.Context, does, sql string, by invalidation.By, rest ...any) error {
	if _, err := d.db.Exec(ctx, sql, append([]any{by.Reason, given(by.Actor)}, rest...)...); err != nil {
		return fmt.Errorf("%s: %w", does, invalidation.Translate(err))
	}
	return nil
}

// given returns nil for a zero value: a condition that is not set.
func given[T comparable](v T) *T { return postgres.Given(v) }
