package changelog

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The verbs of the schema as the tests of this package give them. Users call the functions of the schema.

// Watch makes changes of a table entries of a change_log queue. No columns mean all, no keys the primary key.
func Watch(ctx context.Context, db postgres.DB, table, queue string, columns, keys []string, by invalidation.By) error {
	_, err := db.Exec(ctx, `SELECT penstock.watch($1::text::regclass, $2, $3, $4, $5, coalesce(nullif($6, ''), current_user::text))`,
		table, queue, columns, keys, by.Reason, by.Actor)
	if err != nil {
		return fmt.Errorf("watch table %s: %w", table, err)
	}
	return nil
}

// Unwatch ends all watches of a table and leaves nothing behind. It returns how many there were.
func Unwatch(ctx context.Context, db postgres.DB, table string, by invalidation.By) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT penstock.unwatch($1::text::regclass, NULL, $2, coalesce(nullif($3, ''), current_user::text))`,
		table, by.Reason, by.Actor).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("unwatch table %s: %w", table, err)
	}
	return n, nil
}
