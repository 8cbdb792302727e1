package invalidation

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Compact merges waiting entries of a lock key into the oldest of them, by the queue's rule
// (Config.Merge), and returns how many it replaced; those end done, "merged into" the oldest.
// Entries that a node was handed are not touched. It returns 0 if there is nothing to merge or a
// claim of the key is in progress, and ErrState if the queue is not mergeable.
func (q *Queue) Compact(ctx context.Context, key string) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, `SELECT penstock.compact($1, $2)`, q.Name, key).Scan(&n)
	return n, q.errorf("compact key "+key+" of", err)
}

// CompactQueue compacts the keys that have at least minEntries waiting entries, of the next `keys`
// keys after the key `after`. It returns how many entries it replaced and the last key that it
// read, empty at the end of the queue.
func (q *Queue) CompactQueue(ctx context.Context, minEntries, keys int,
	after string,
) (replaced int, next string, err error) {
	var last *string
	const sql = `SELECT after, replaced FROM penstock.compact_queue($1, $2, $3, $4)`
	err = q.db.QueryRow(ctx, sql, q.Name, minEntries, keys, after).Scan(&last, &replaced)
	if last != nil {
		next = *last
	}
	return replaced, next, q.errorf("compact", err)
}

// CompactWith is Compact with a merge function of the caller: it gets the entries oldest first and
// returns the payload of the remaining one. Claims skip the key while it runs, so it should be
// quick; an error changes nothing.
func (q *Queue) CompactWith(ctx context.Context, key string,
	merge func([]Entry) (json.RawMessage, error),
) (int, error) {
	replaced := 0
	err := postgres.InTx(ctx, q.db, func(tx pgx.Tx) error {
		entries, err := compactable(ctx, tx, q.Name, key)
		if err != nil || len(entries) == 0 {
			return err
		}
		payload, err := merge(entries)
		if err != nil {
			return fmt.Errorf("merge %d entries of key %s: %w", len(entries), key, err)
		}
		ids := make([]EntryID, len(entries))
		for i, e := range entries {
			ids[i] = e.ID
		}
		const sql = `SELECT penstock.replace_merged(penstock.queue_row($1), $2, $3)`
		return tx.QueryRow(ctx, sql, q.Name, ids, payload).Scan(&replaced)
	})
	if err != nil {
		return 0, q.errorf("compact key "+key+" of", err)
	}
	return replaced, nil
}

func compactable(ctx context.Context, tx pgx.Tx, queue, key string) ([]Entry, error) {
	const sql = `
SELECT id, payload, coalesce(name, ''), attempt, crashes, coalesce(cost, 0), coalesce(trace, '')
  FROM penstock.compactable(penstock.queue_row($1), $2)
 ORDER BY id`
	return pgx.CollectRows(postgres.Query(ctx, tx, sql, queue, key), func(row pgx.CollectableRow) (Entry, error) {
		var e Entry
		return e, row.Scan(&e.ID, &e.Payload, &e.Name, &e.Attempt, &e.Crashes, &e.Cost, &e.Trace)
	})
}
