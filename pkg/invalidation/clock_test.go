package invalidation

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// What was written while the clock was an hour ahead does not count for an hour once it is right.
func TestBucketThatWasChargedInTimeToComeIsFull(t *testing.T) {
	b := newBed(t, Config{})
	b.must(setLimit(b.ctx, b.pool, "rate", limitOptions{Rate: 0.001, Burst: 2}))
	b.exec(b.pool, `SELECT penstock.use_limit('work', 'rate')`)
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	b.q = q
	b.push("", "", "", "")
	b.want(len(b.claim(4)), 2)
	b.want(len(b.claim(4)), 0)
	b.exec(b.pool, `UPDATE penstock.bucket SET at = at + interval '1 hour'`)
	b.want(len(b.claim(4)), 2)
	b.want(len(b.claim(4)), 0)
}

func TestKeyThatWasThrottledInTimeToComeGoesOn(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.set_limit('keys', '{"rate": 0.01, "burst": 1, "per_key": true}')`)
	b.exec(b.pool, `SELECT penstock.use_limit('work', 'keys')`)
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	b.q = q
	b.push("K", "K")
	b.settle(doneAll(b.claimOne())...)
	throttled := func() int {
		return b.count(`SELECT count(*) FROM penstock.ready WHERE priority = penstock.throttled_priority()`)
	}
	b.await("the key is throttled", func() bool {
		b.want(len(b.claim(1)), 0)
		return throttled() > 0
	})
	b.want(b.count(`SELECT penstock.requeue_throttled($1, 10)`, b.q.ID), 0)
	b.exec(b.pool, `UPDATE penstock.ready SET pos = pos + 3600::bigint * 1000000 WHERE priority = penstock.throttled_priority()`)
	b.want(b.count(`SELECT penstock.requeue_throttled($1, 10)`, b.q.ID), 1)
	b.want(throttled(), 0)
}

// A release whose delay was counted from a clock that was a year ahead kept the entry for a year.
func TestEntryThatWasReleasedInTimeToComeIsClaimed(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K")
	locks := b.claim(2)
	b.want(len(locks), 2)
	for _, l := range locks {
		b.settle(last(Release(l, l.Entries[0].ID, 30*24*time.Hour)))
	}
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE not_before BETWEEN now() + interval '23 hours' AND now() + interval '1 day'`), 2)
	b.want(len(b.claim(2)), 0)
	b.exec(b.pool, `UPDATE penstock.ready SET not_before = not_before + interval '1 year'`)
	b.want(len(b.claim(2)), 2)
}

func TestThrottleThatWasOrderedInTimeToComeIsOver(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "")
	throttle := func() { b.exec(b.pool, `SELECT penstock.throttle('work', interval '1 minute')`) }
	throttle()
	b.want(len(b.claim(1)), 0)
	b.exec(b.pool, `UPDATE penstock.throttle SET at = at + interval '1 hour', until = until + interval '1 hour'`)
	b.want(len(b.claim(1)), 1)
	throttle()
	b.want(len(b.claim(1)), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.throttle WHERE until < now() + interval '2 minutes'`), 1)
}

func TestRateBelowItsLeastIsRefused(t *testing.T) {
	b := newBed(t, Config{})
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.set_limit('tiny', '{"rate": 1e-13, "burst": 1, "per_key": true}')`)
	if postgres.Code(err) != "PS002" {
		t.Errorf("a rate below the least: %v", err)
	}
	b.exec(b.pool, `SELECT penstock.set_limit('least', '{"rate": 1e-7, "burst": 1, "per_key": true}')`)
	b.exec(b.pool, `SELECT penstock.throttle_key($1, 'K', 1e300)`, b.q.ID)
	b.exec(b.pool, `DELETE FROM penstock.ready`)
}
