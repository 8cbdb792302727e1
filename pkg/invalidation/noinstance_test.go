package invalidation

import (
	"fmt"
	"testing"
)

// queueOfFlux makes a queue of a model with one instance, whose entries fail where there is none for 10 ms.
func (b *bed) queueOfFlux(onFailure string) *Queue {
	b.Helper()
	b.exec(b.pool, `SELECT penstock.register_model('flux', '{"protocol": "cog"}')`)
	q, err := Alter(b.ctx, b.pool, "flux", map[string]any{
		"on_no_instance": "fail", "no_instance_timeout": "10 ms", "on_failure": onFailure,
	})
	b.must(err)
	b.exec(b.pool, `
INSERT INTO penstock.instance (model, server, endpoint, slots, state)
VALUES ('flux', 'a', 'http://127.0.0.1:9/', 4, 'ready')`)
	return q
}

// failInPasses lets entries fail in passes of two ready rows each, and returns how many did.
func (b *bed) failInPasses(q *Queue, passes int) (failed int) {
	b.Helper()
	for range passes {
		n, err := q.FailWithoutInstance(b.ctx, 2)
		b.must(err)
		failed += n
	}
	return failed
}

// beginOutage takes the instance away, a minute ago.
func (b *bed) beginOutage() {
	b.Helper()
	b.exec(b.pool, `UPDATE penstock.instance SET state = 'unhealthy'`)
	b.must(NoteOutages(b.ctx, b.pool))
	b.exec(b.pool, `UPDATE penstock.model_outage SET since = since - interval '1 minute'`)
}

// What an outage costs the leader is proportional to the entries that fail, not to those that wait for their time or
// for an operator.
func TestAnOutageReadsNoEntriesThatAreNotDue(t *testing.T) {
	b := newBed(t, Config{})
	q := b.queueOfFlux("continue")
	push := func(sql string) {
		b.exec(b.pool, `SELECT count(penstock.push('flux', '{}', `+sql+`)) FROM generate_series(1, 20) i`)
	}
	push(`lock_key => 'early-' || i % 2`)
	b.beginOutage()
	x := b.explainer()
	cost := func() int {
		p := x.explain("fail", statement{`SELECT penstock.fail_without_instance($1, $2)`, fmt.Sprintf(`%d, 10`, q.ID)})
		return p.buffers()
	}
	cost() // warms the caches of the session
	before := cost()
	b.exec(b.pool, `
INSERT INTO penstock.entry_flux (id, queue_id, status, priority, due_at, payload)
SELECT -i, $1, 'initial', 1, now() + interval '1 hour', '{}' FROM generate_series(1, 20000) i`, q.ID)
	if after := cost(); after > 2*before {
		t.Errorf("10 failures read %d buffers beside 20,000 entries that are not due, and %d without them", after, before)
	}
	n, err := q.FailWithoutInstance(b.ctx, 1000)
	b.must(err)
	b.want(n, 20)
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE queue_id = $1`, q.ID), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE queue_id = $1`, q.ID), 20000)
}

// However many ready rows of blocked keys there are, each pass makes progress.
func TestAnOutageGoesOnBehindBlockedKeys(t *testing.T) {
	b := newBed(t, Config{})
	q := b.queueOfFlux("block_key")
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', lock_key => 'k' || i % 10) FROM generate_series(1, 30) i`)
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', priority => 9)`)
	b.beginOutage()
	b.want(b.failInPasses(q, 10), 11) // the first of each key, which blocks it, and the solo one
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE queue_id = $1`, q.ID), 0)
	b.exec(b.pool, `UPDATE penstock.instance SET state = 'ready'`)
	b.exec(b.pool, `SELECT penstock.unblock_keys('flux')`)
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE queue_id = $1`, q.ID), 10)
}

// Ready rows of lock keys that have no claimable entry are taken away, so that the rows behind them are read.
func TestAnOutageGoesOnBehindKeysWithoutEntries(t *testing.T) {
	b := newBed(t, Config{})
	q := b.queueOfFlux("continue")
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', priority => 9)`)
	b.exec(b.pool, `
INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
SELECT $1, 1, '', i, 'gone-' || i FROM generate_series(1, 6) i`, q.ID)
	b.beginOutage()
	b.want(b.failInPasses(q, 4), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE queue_id = $1`, q.ID), 0)
}

// Entries behind a lock fail when their key is unlocked. Until then their ready rows, one for each flow, are in no way of
// other entries.
func TestAnOutageFailsTheEntriesBehindALockWhenItEnds(t *testing.T) {
	b := newBed(t, Config{})
	q := b.queueOfFlux("continue")
	b.q = q
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', lock_key => 'k')`)
	running := b.claimOne()
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', lock_key => 'k', flow => 'flow-' || i) FROM generate_series(1, 30) i`)
	b.exec(b.pool, `SELECT penstock.push('flux', '{}', priority => 9)`)
	b.beginOutage()
	n, err := q.FailWithoutInstance(b.ctx, 2)
	b.must(err)
	b.want(n, 1) // the one without a lock key
	b.settle(doneAll(running)...)
	n, err = q.FailWithoutInstance(b.ctx, 100)
	b.must(err)
	b.want(n, 30)
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE queue_id = $1`, q.ID), 0)
}
