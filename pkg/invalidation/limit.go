package invalidation

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// refundSQL gives back what locks $2 with tokens $3 took out of token buckets: for $4 entries that were cancelled, and for
// those that have not run, where $5 says so.
const refundSQL = `SELECT penstock.refund($1, $2, $3, $4, $5)`

// refundUncovered gives back to token buckets the entries that a claim counted by its snapshot, and which had ended by then.
func (q *Queue) refundUncovered(ctx context.Context, groups []*Lock) error {
	if q.rates == rateNone {
		return nil
	}
	var keys []string
	var tokens []Token
	var uncovered []int32
	var rest []bool
	for _, l := range groups {
		if n := l.counted - len(l.Entries); n > 0 {
			keys, tokens = append(keys, l.Key), append(tokens, l.Token)
			uncovered, rest = append(uncovered, int32(n)), append(rest, false)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	_, err := q.db.Exec(ctx, refundSQL, q.ID, keys, tokens, uncovered, rest)
	return q.errorf("refund limits of", err)
}

// queueRefund refunds entries that end cancelled, and those that their node hands back before they ran. A handler that
// hands one back has called somebody to find out that it must: that counts.
func (q *Queue) queueRefund(batch *pgx.Batch, endings []Ending) {
	if q.rates == rateNone {
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
