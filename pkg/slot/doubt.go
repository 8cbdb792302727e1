package slot

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Doubt is a slot whose call may still run at the worker, although its node does not follow it any more.
type Doubt struct {
	Held
	Reason string
	Queue  int32                // of the entry; 0: the call is of none
	Entry  invalidation.EntryID // 0: the call is of none
}

const doubtSQL = `
UPDATE penstock.slot s
   SET doubt_at = clock_timestamp(), doubt = k.reason,
       queue_id = nullif(k.queue_id, 0), entry_id = nullif(k.entry_id, 0)
  FROM unnest($1::int[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bigint[])
       k(instance_id, number, token, reason, queue_id, entry_id)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token`

// Doubt puts slots in doubt. They stay counted, and are not the node's to use or to give any more.
func (h *Holder) Doubt(ctx context.Context, doubts []Doubt) error {
	slots, reasons := make([]Held, len(doubts)), make([]string, len(doubts))
	queues, entries := make([]int32, len(doubts)), make([]int64, len(doubts))
	for i, d := range doubts {
		slots[i], reasons[i], queues[i], entries[i] = d.Held, d.Reason, d.Queue, int64(d.Entry)
	}
	instances, numbers, tokens := columns(slots)
	if _, err := h.DB.Exec(ctx, doubtSQL, instances, numbers, tokens, reasons, queues, entries); err != nil {
		return fmt.Errorf("mark %d slots in doubt: %w", len(doubts), err)
	}
	return nil
}

// Orphan is a held slot that no live node follows.
type Orphan struct {
	Token int64
	Age   time.Duration // since its node died, or put it in doubt
	Dead  bool          // its node died
}

const orphansSQL = `SELECT slot_token, age, dead FROM penstock.orphan_slots($1)`

// Orphans lists the slots of an instance that no live node follows.
func Orphans(ctx context.Context, db postgres.DB, instance int32) ([]Orphan, error) {
	orphans, err := pgx.CollectRows(postgres.Query(ctx, db, orphansSQL, instance), pgx.RowToStructByPos[Orphan])
	if err != nil {
		return nil, fmt.Errorf("read orphaned slots: %w", err)
	}
	return orphans, nil
}

const freeSQL = `SELECT penstock.free_slots($1, $2)`

// Free frees those slots of an instance, by their tokens, that are orphans still. It returns how many.
func Free(ctx context.Context, db postgres.DB, instance int32, tokens []int64) (freed int, err error) {
	if err := db.QueryRow(ctx, freeSQL, instance, tokens).Scan(&freed); err != nil {
		return 0, fmt.Errorf("free stale slots: %w", err)
	}
	return freed, nil
}
