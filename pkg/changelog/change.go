package changelog

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Change is one entry of a change_log queue: for this object, a field was set from one value to another.
type Change struct {
	Table  string          `json:"table"`  // with its schema
	Object json.RawMessage `json:"object"` // the key: a value, or an object where the key has several columns; null after TRUNCATE
	// Field is empty when the object came or went. Then To or From has its watched columns, by name.
	Field string          `json:"field"`
	From  json.RawMessage `json:"from"`
	To    json.RawMessage `json:"to"`
}

// Came says that the object is new.
func (c Change) Came() bool { return c.Field == "" && isNull(c.From) && !isNull(c.To) }

// Went says that the object is gone.
func (c Change) Went() bool { return c.Field == "" && !isNull(c.From) }

// Truncated says that all objects of the table are gone.
func (c Change) Truncated() bool { return isNull(c.Object) }

func isNull(v json.RawMessage) bool { return len(v) == 0 || string(v) == "null" }

// Columns returns the watched columns of an object that came or went.
func (c Change) Columns() (map[string]json.RawMessage, error) {
	source := c.To
	if c.Went() {
		source = c.From
	}
	var columns map[string]json.RawMessage
	if err := json.Unmarshal(source, &columns); err != nil {
		return nil, fmt.Errorf("read columns of a change of %s: %w", c.Table, err)
	}
	return columns, nil
}

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
