package invalidation

import (
	"testing"
	"time"
)

// An entry that was retried while the clock was a year ahead waited for a year.
func TestRetryByAClockThatWasAheadWaitsAsLongAsItWasTo(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "", "")
	locks := b.claim(3)
	b.want(len(locks), 3)
	for _, l := range locks {
		b.settle(last(Retry(l, l.Entries[0].ID, Failure{Error: "no"}, time.Hour, 0)))
	}
	// One failed by that clock as well, and was snoozed for an hour after it was set right.
	b.exec(b.pool, `UPDATE penstock.entry SET
		history = jsonb_set(history, '{-1,at}', to_jsonb((history->-1->>'at')::timestamptz + interval '1 year')) WHERE id = $1`, ids[2])
	b.exec(b.pool, `SELECT penstock.push('work', '{}', due_at => now() + n * interval '30 days') FROM generate_series(1, 20) n`)
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = due_at + interval '1 year',
		history = jsonb_set(history, '{-1,at}', to_jsonb((history->-1->>'at')::timestamptz + interval '1 year')) WHERE id = ANY ($1)`, ids[:2])
	walk := func(limit int) (found []EntryID, steps int) {
		for place := (DuePlace{}); ; steps++ {
			ids, next, err := b.q.Misdated(b.ctx, place, limit)
			b.must(err)
			if found = append(found, ids...); next == (DuePlace{}) {
				return found, steps
			}
			place = next
		}
	}
	found, steps := walk(3)
	b.want(len(found), 2)
	b.want(steps, 23/3)
	n, err := b.q.Redate(b.ctx, found)
	b.must(err)
	b.want(n, 2)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE attempt = 1 AND due_at BETWEEN now() + interval '50 minutes' AND now() + interval '1 hour'`), 3)
	found, _ = walk(100)
	b.want(len(found), 0)
	n, err = b.q.Redate(b.ctx, ids)
	b.must(err)
	b.want(n, 0)
}
