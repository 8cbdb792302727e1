package invalidation

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// refundSQL gives back what locks $2 with tokens $3 took out of token buckets: for $4 entries that the lock
// does not cover, for those that have not run, where $5 says so, and for entries $6 under tokens $7 that are
// about to end cancelled. An entry that has ended is not refunded again, however often its ending is settled.
const refundSQL = `
SELECT penstock.refund($1, $2, $3, ARRAY(
       SELECT (k.uncovered + (SELECT count(*)
                                FROM unnest($6::bigint[], $7::bigint[]) c(id, token)
                               CROSS JOIN LATERAL (SELECT FROM penstock.entry_X WHERE queue_id = $1
                                   AND id = c.id OFFSET 0) e
                               WHERE c.token = k.token))::int
         FROM unnest($3::bigint[], $4::int[]) WITH ORDINALITY k(token, uncovered, ord) ORDER BY ord), $5)`

// refundUncovered gives back to token buckets the entries that a claim counted by its snapshot, and which had
// ended by then.
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
	_, err := q.db.Exec(ctx, q.sql.refund, q.ID, keys, tokens, uncovered, rest, []EntryID{}, []Token{})
	return q.errorf("refund limits of", err)
}

// queueRefund refunds entries that end cancelled, and entries that their node releases before they
// ran. An entry that a handler releases is not refunded: the handler has used the limited resource.
func (q *Queue) queueRefund(batch *pgx.Batch, endings []Ending) {
	if q.rates == rateNone {
		return
	}
	index := map[Token]int{}
	var keys []string
	var tokens []Token
	var none []int32 // entries that the lock does not cover
	var cancelled []EntryID
	var under []Token // of cancelled
	var rest []bool
	for _, e := range endings {
		unrun := e.Last && (e.verb == verbYield || e.verb == verbRelease && e.reason == "" ||
			e.verb == verbFail && q.EndsLock(&e) && !e.Lock.Solo())
		if e.verb != verbCancel && !unrun {
			continue
		}
		at, seen := index[e.Lock.Token]
		if !seen {
			at = len(keys)
			index[e.Lock.Token] = at
			keys, tokens, none, rest = append(keys, e.Lock.Key), append(tokens, e.Lock.Token), append(none, 0),
				append(rest, false)
		}
		rest[at] = rest[at] || unrun
		if e.verb == verbCancel {
			cancelled, under = append(cancelled, e.Entry), append(under, e.Lock.Token)
		}
	}
	if len(keys) > 0 {
		batch.Queue(q.sql.refund, q.ID, keys, tokens, none, rest, cancelled, under)
	}
}
