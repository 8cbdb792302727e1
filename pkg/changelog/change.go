package changelog

import (
	"encoding/json"
	"fmt"
)

// Change is one entry of a change_log queue: for this object, a field was set from one value to another.
type Change struct {
	Table string `json:"table"` // with its schema
	// the key: a value, or an object where the key has several columns; null after TRUNCATE
	Object json.RawMessage `json:"object"`
	// Field is empty when the object was inserted or deleted. Then To or From has its watched
	// columns, by name.
	Field string          `json:"field"`
	From  json.RawMessage `json:"from"`
	To    json.RawMessage `json:"to"`
}

// Inserted reports whether the object was inserted.
func (c Change) Inserted() bool { return c.Field == "" && isNull(c.From) && !isNull(c.To) }

// Deleted reports whether the object was deleted.
func (c Change) Deleted() bool { return c.Field == "" && !isNull(c.From) }

// Truncated reports whether all objects of the table were removed by TRUNCATE.
func (c Change) Truncated() bool {
	return c.Field == "" && isNull(c.Object) && isNull(c.From) && isNull(c.To)
}

func isNull(v json.RawMessage) bool { return len(v) == 0 || string(v) == "null" }

// Columns returns the watched columns of an object that was inserted or deleted.
func (c Change) Columns() (map[string]json.RawMessage, error) {
	source := c.To
	if c.Deleted() {
		source = c.From
	}
	var columns map[string]json.RawMessage
	if err := json.Unmarshal(source, &columns); err != nil {
		return nil, fmt.Errorf("read columns of a change of %s: %w", c.Table, err)
	}
	return columns, nil
}
