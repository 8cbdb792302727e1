package invalidation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Limit bounds the locks of the queues that use it. At least MaxUnits or Rate is set.
type Limit struct {
	MaxUnits *int    `json:"max_units,omitempty"` // units in use at once
	Rate     float64 `json:"rate,omitempty"`      // units a second that flow into the token bucket
	Burst    float64 `json:"burst,omitempty"`     // units that the bucket holds: one second's worth
	PerFlow  bool    `json:"per_flow,omitempty"`  // each flow has the limit for itself
	// PerKey gives each lock key the rate for itself. It goes with a rate alone: a key has one holder at a time anyway.
	PerKey bool `json:"per_key,omitempty"`
}

// SetLimit makes the limit of that name, or changes it; the next claim goes by it.
func SetLimit(ctx context.Context, db postgres.DB, name string, l Limit) error {
	if _, err := db.Exec(ctx, `SELECT penstock.set_limit($1, $2)`, name, l); err != nil {
		return fmt.Errorf("set limit %q: %w", name, translate(err))
	}
	return nil
}

// UseLimit puts a queue under a limit, with so many units for each lock; 0 units take it out again.
func UseLimit(ctx context.Context, db postgres.DB, queue, limit string, units int) error {
	if _, err := db.Exec(ctx, `SELECT penstock.use_limit($1, $2, $3)`, queue, limit, units); err != nil {
		return fmt.Errorf("put queue %q under limit %q: %w", queue, limit, translate(err))
	}
	return nil
}

// refundSQL gives back what locks $2 with tokens $3 took out of token buckets: for $4 entries that were cancelled, and for
// those that have not run, where $5 says so.
const refundSQL = `SELECT penstock.refund($1, $2, $3, $4, $5)`

// queueRefund refunds entries that end cancelled, and those that their node hands back before they ran. A handler that
// hands one back has called somebody to find out that it must: that counts.
func (q *Queue) queueRefund(batch *pgx.Batch, endings []Ending) {
	if q.pace == 0 {
		return
	}
	places := map[Token]int{}
	var keys []string
	var tokens []Token
	var cancelled []int32
	var rest []bool
	for _, e := range endings {
		unrun := e.Last && (e.verb == verbYield || e.verb == verbRelease && e.reason == "")
		if e.verb != verbCancel && !unrun {
			continue
		}
		at, seen := places[e.Lock.Token]
		if !seen {
			at = len(keys)
			places[e.Lock.Token] = at
			keys, tokens, cancelled, rest = append(keys, e.Lock.Key), append(tokens, e.Lock.Token), append(cancelled, 0), append(rest, false)
		}
		rest[at] = rest[at] || unrun
		if e.verb == verbCancel {
			cancelled[at]++
		}
	}
	if len(keys) > 0 {
		batch.Queue(refundSQL, q.ID, keys, tokens, cancelled, rest)
	}
}
