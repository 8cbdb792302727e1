package invalidation

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// refundSQL gives back what locks $2 with tokens $3 took out of token buckets: for $4 entries that the lock
// does not cover, for those that have not run, where $5 says so, and for entries $6 under tokens $7 that are
// about to end cancelled. Of all that are left of a lock those that have run stay paid: a second row of the lock
// with their number, negative, and $5 false. An entry that has ended is not refunded again, however often its
// ending is settled.
const refundSQL = `
SELECT penstock.refund($1, $2, $3, ARRAY(
       SELECT (k.uncovered + (SELECT count(*)
                                FROM unnest($6::bigint[], $7::bigint[]) c(id, token)
                               CROSS JOIN LATERAL (SELECT FROM penstock.entry_X WHERE queue_id = $1
                                   AND id = c.id OFFSET 0) e
                               WHERE c.token = k.token AND k.uncovered >= 0))::int
         FROM unnest($3::bigint[], $4::int[]) WITH ORDINALITY k(token, uncovered, ord) ORDER BY ord), $5)`

// refunds are the arguments of refundSQL.
type refunds struct {
	keys      []string
	tokens    []Token
	uncovered []int32
	rest      []bool
	cancelled []EntryID
	under     []Token // of cancelled
}

// lock adds a row of a lock.
func (r *refunds) lock(key string, token Token, uncovered int32, rest bool) {
	r.keys, r.tokens = append(r.keys, key), append(r.tokens, token)
	r.uncovered, r.rest = append(r.uncovered, uncovered), append(r.rest, rest)
}

// refundUncovered gives back to token buckets the entries that a claim counted by its snapshot, and which had
// ended by then. What a lock that covers nothing took is given back as it ends, see addRefund.
func (q *Queue) refundUncovered(ctx context.Context, groups []*Lock) error {
	if q.rates == rateNone {
		return nil
	}
	var r refunds
	for _, l := range groups {
		if n := l.counted - len(l.Entries); n > 0 && len(l.Entries) > 0 {
			r.lock(l.Key, l.Token, int32(n), false)
		}
	}
	if len(r.keys) == 0 {
		return nil
	}
	_, err := q.db.Exec(ctx, q.sql.refund, q.ID, r.keys, r.tokens, r.uncovered, r.rest, []EntryID{}, []Token{})
	return q.errorf("refund limits of", err)
}

// Refunds reports whether settling an ending gives back what its lock took out of token buckets: for an entry that ends
// cancelled, and for those of the lock that have not run.
func (q *Queue) Refunds(e *Ending) bool {
	return q.rates != rateNone && (e.verb == verbCancel || q.leavesUnrun(e))
}

// leavesUnrun says that entries of the lock, which ends with e, have not run.
func (q *Queue) leavesUnrun(e *Ending) bool {
	return e.Last && (e.verb == verbYield || e.verb == verbRelease && !e.byHandler() ||
		q.EndsLock(e) && len(e.Lock.Entries) > 1)
}

// byHandler says that the handler handed the entry back, after it has used what is limited.
func (e *Ending) byHandler() bool { return e.verb == verbRelease && e.reason != "" }

// addRefund refunds entries that end cancelled, and entries that their node releases before they
// ran. An entry that a handler releases is not refunded, since the handler has used the limited resource;
// those behind it, which go back with it, are.
func (q *Queue) addRefund(batch *pgx.Batch, endings []Ending) {
	var r refunds
	index := map[Token]int{}
	turnedAway := map[Token]int32{}
	for i := range endings {
		e := &endings[i]
		if e.byHandler() {
			turnedAway[e.Lock.Token]++
		}
		if !q.Refunds(e) {
			continue
		}
		unrun := q.leavesUnrun(e)
		at, seen := index[e.Lock.Token]
		if !seen {
			at = len(r.keys)
			index[e.Lock.Token] = at
			r.lock(e.Lock.Key, e.Lock.Token, 0, false)
		}
		if n := e.Lock.counted; n > 0 && len(e.Lock.Entries) == 0 {
			r.uncovered[at] = int32(n) // of its entries some may be left, if its key is blocked
			continue
		}
		r.rest[at] = r.rest[at] || unrun
		if n := turnedAway[e.Lock.Token]; unrun && n > 0 {
			r.lock(e.Lock.Key, e.Lock.Token, -n, false)
		}
		if e.verb == verbCancel {
			r.cancelled, r.under = append(r.cancelled, e.Entry), append(r.under, e.Lock.Token)
		}
	}
	r.add(batch, q)
}

// addRefundUnrun refunds what locks cover, none of which has run.
func (q *Queue) addRefundUnrun(batch *pgx.Batch, locks []unlocking) {
	if q.rates == rateNone {
		return
	}
	var r refunds
	for _, l := range locks {
		r.lock(l.key, l.token, 0, true)
	}
	r.add(batch, q)
}

func (r *refunds) add(batch *pgx.Batch, q *Queue) {
	if len(r.keys) > 0 {
		batch.Queue(q.sql.refund, q.ID, r.keys, r.tokens, r.uncovered, r.rest, r.cancelled, r.under)
	}
}
