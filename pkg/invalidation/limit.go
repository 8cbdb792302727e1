package invalidation

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// refundSQL gives back what locks $2 with tokens $3 took out of token buckets: for $4 of their entries, for entries $6
// under tokens $7 that are about to end before they ran, and, where $5 says so, for what the table has left of the
// lock. An entry that has ended is not refunded again, however often its ending is settled.
const refundSQL = `
SELECT penstock.refund($1, $2, $3, ARRAY(
       SELECT sum(x.n)::int
         FROM (SELECT k.token, k.unrun AS n, k.ord
                 FROM unnest($3::bigint[], $4::int[]) WITH ORDINALITY k(token, unrun, ord)
                UNION ALL
               SELECT c.token, 1, NULL
                 FROM unnest($6::bigint[], $7::bigint[]) c(id, token)
                CROSS JOIN LATERAL (SELECT FROM penstock.entry_X WHERE queue_id = $1 AND id = c.id OFFSET 0) e) x
        GROUP BY x.token ORDER BY min(x.ord)), $5)`

// refunds are the arguments of refundSQL.
type refunds struct {
	keys    []string
	tokens  []Token
	unrun   []int32
	rest    []bool
	removed []EntryID
	under   []Token // of removed
}

// lock adds a lock, and returns its index.
func (r *refunds) lock(key string, token Token, rest bool) int {
	r.keys, r.tokens = append(r.keys, key), append(r.tokens, token)
	r.unrun, r.rest = append(r.unrun, 0), append(r.rest, rest)
	return len(r.keys) - 1
}

// refundUncoveredSQL gives back what locks $2 with tokens $3 took out of token buckets for more than the $4 entries
// that they cover. From then on their records count those alone, so that nothing is given back twice.
const refundUncoveredSQL = `
WITH held AS MATERIALIZED (
    SELECT l.row, k.lock_key, k.token, k.covered, l.entry_count - k.covered AS uncovered
      FROM (SELECT lock_key COLLATE "C" AS lock_key, token, covered
              FROM unnest($2::text[], $3::bigint[], $4::int[]) t(lock_key, token, covered) ORDER BY 1) k
     CROSS JOIN LATERAL (
           SELECT ctid AS row, entry_count FROM penstock.lock
            WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token AND entry_count > k.covered
              FOR UPDATE) l
), counted AS (
    UPDATE penstock.lock d SET entry_count = h.covered FROM held h WHERE d.ctid = h.row
)
SELECT penstock.refund($1, array_agg(lock_key), array_agg(token), array_agg(uncovered), array_agg(false)) FROM held`

// refundUncovered gives back to token buckets the entries that a claim counted by its snapshot, and which its locks do
// not cover: they had ended by then, or cannot be read.
func (q *Queue) refundUncovered(ctx context.Context, locks []*Lock) error {
	if q.rates == rateNone {
		return nil
	}
	var keys []string
	var tokens []Token
	var covered []int32
	for _, l := range locks {
		if l.uncovered() {
			keys, tokens = append(keys, l.Key), append(tokens, l.Token)
			covered = append(covered, int32(len(l.Entries)))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	_, err := q.db.Exec(ctx, refundUncoveredSQL, q.ID, keys, tokens, covered)
	return q.errorf("refund limits of", err)
}

// uncovered reports that the lock covers fewer entries than its claim counted.
func (l *Lock) uncovered() bool { return len(l.Entries) == 0 || len(l.Entries) < l.counted }

// Refunds reports whether settling an ending gives back what its lock took out of token buckets: for an entry that is
// cancelled or expires before it ran, and for those that the lock leaves and that have not run.
func (q *Queue) Refunds(e *Ending) bool {
	return q.rates != rateNone &&
		(e.removesUnrun() || e.Last && (!e.began() || q.EndsLock(e) && len(e.Lock.Entries) > 1))
}

// began reports that the entry has run, and may have used what is limited. An entry that its handler hands back has.
func (e *Ending) began() bool {
	switch e.verb {
	case verbYield:
		return false
	case verbRelease:
		return e.started || e.reason != ""
	case verbCancel, verbExpire:
		return e.started
	default:
		return true
	}
}

// removesUnrun reports that the entry is cancelled or expires, and has not run.
func (e *Ending) removesUnrun() bool {
	return (e.verb == verbCancel || e.verb == verbExpire) && !e.began()
}

// unrun is how many entries the lock, which ends with e, leaves that have not run.
func (l *Lock) unrun(e *Ending) int {
	switch {
	case len(l.Entries) > 1:
		return len(l.Entries) - len(l.paid)
	case e.began() || e.removesUnrun():
		return 0
	default:
		return len(l.Entries)
	}
}

// pay notes in their locks which entries of groups have begun, or are refunded by themselves. It is called for endings
// that a node settles, which come one after another for each lock. A handler that finishes its entry (FinishTx) runs
// beside them; the node settles that entry as well.
func (q *Queue) pay(endings []Ending) {
	if q.rates == rateNone {
		return
	}
	for i := range endings {
		e := &endings[i]
		l := e.Lock
		if len(l.Entries) < 2 || !e.began() && !e.removesUnrun() {
			continue
		}
		if l.paid == nil {
			l.paid = make(map[EntryID]bool, len(l.Entries))
		}
		l.paid[e.Entry] = true
	}
}

// addRefund refunds entries that end cancelled or expired before they ran, and those that a lock leaves which have not
// run: their node releases them, or they are behind one that a handler hands back.
func (q *Queue) addRefund(batch *pgx.Batch, endings []Ending) {
	if q.rates == rateNone {
		return
	}
	var r refunds
	index := map[Token]int{}
	for i := range endings {
		e := &endings[i]
		unrun := 0
		if e.Last {
			unrun = e.Lock.unrun(e)
		}
		if unrun == 0 && !e.removesUnrun() {
			continue
		}
		at, seen := index[e.Lock.Token]
		if !seen {
			at = r.lock(e.Lock.Key, e.Lock.Token, false)
			index[e.Lock.Token] = at
		}
		r.unrun[at] += int32(unrun)
		if e.removesUnrun() {
			r.removed, r.under = append(r.removed, e.Entry), append(r.under, e.Lock.Token)
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
		r.lock(l.key, l.token, true)
	}
	r.add(batch, q)
}

func (r *refunds) add(batch *pgx.Batch, q *Queue) {
	if len(r.keys) > 0 {
		batch.Queue(q.sql.refund, q.ID, r.keys, r.tokens, r.unrun, r.rest, r.removed, r.under)
	}
}
