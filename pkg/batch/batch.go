package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// ErrNotFound says that there is no such batch.
var ErrNotFound = errors.New("batch not found")

// Batch is a set to be worked on. Name, Queue and one of Items and Query are needed.
type Batch struct {
	Name  string // for people
	Queue string // whose handler runs the parts
	// Items is the set, each a JSON value.
	Items []json.RawMessage
	// Query is a SELECT whose rows are the set, each an object by column names. A task node runs it with its own
	// rights, so it must come from somebody who may have those. Give it an ORDER BY if the order of items matters.
	Query    string
	PartSize int // items of a part: 100
	Window   int // parts in the queue at a time: 1000
	// Detail goes into the payload of every entry of the batch; it must be an object.
	Detail   json.RawMessage
	Flow     string
	Priority *int16 // 0 to 9; nil for the queue's default
	// CompletionQueue gets the completion entry: the batch's own queue for a Reduce, any other to be told. Empty: none.
	CompletionQueue string
}

func (b Batch) options() map[string]any {
	set := map[string]any{}
	put := func(name string, given bool, value any) {
		if given {
			set[name] = value
		}
	}
	put("items", b.Items != nil, b.Items)
	put("query", b.Query != "", b.Query)
	put("part_size", b.PartSize != 0, b.PartSize)
	put("window_parts", b.Window != 0, b.Window)
	put("detail", b.Detail != nil, b.Detail)
	put("flow", b.Flow != "", b.Flow)
	put("priority", b.Priority != nil, b.Priority)
	put("completion_queue", b.CompletionQueue != "", b.CompletionQueue)
	return set
}

// Create makes a batch and returns its id. On a transaction it begins when that commits.
func Create(ctx context.Context, db postgres.DB, b Batch, by invalidation.By) (id int64, err error) {
	const sql = `SELECT penstock.create_batch($1, $2, $3, $4, coalesce($5, current_user::text))`
	if err := db.QueryRow(ctx, sql, b.Name, b.Queue, b.options(), by.Reason, postgres.Given(by.Actor)).Scan(&id); err != nil {
		return 0, fmt.Errorf("create batch %q: %w", b.Name, translate(err))
	}
	return id, nil
}

// translate names the facts that the schema's functions tell by SQLSTATE.
func translate(err error) error {
	return postgres.Named(err, map[string]error{
		"PS001": invalidation.ErrQueueNotFound, "PS002": invalidation.ErrInvalid, "PS006": invalidation.ErrState, "PS012": ErrNotFound,
	})
}
