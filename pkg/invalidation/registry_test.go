package invalidation

import "testing"

// Between two heartbeats any number of changes may be made, of which the versions of some undo those of others: a queue
// that is made has the version of one that was dropped.
func TestQueueMadeAgainChangesTheRegistryVersion(t *testing.T) {
	b := newControlBed(t, Config{})
	version := func() int64 {
		t.Helper()
		o, err := Renew(b.ctx, b.pool, here, Beat{})
		b.must(err)
		return o.RegistryVersion
	}
	seen := map[int64]string{}
	for _, change := range []string{
		`SELECT penstock.create_queue('other')`,
		`SELECT penstock.drop_queue('other')`,
		`SELECT penstock.create_queue('other', '{"max_concurrent_per_node": 3}')`,
		`DO $$ BEGIN PERFORM penstock.drop_queue('other'); PERFORM penstock.create_queue('other'); END $$`,
		`DO $$ BEGIN PERFORM penstock.drop_queue('other'); PERFORM penstock.alter_queue('work', '{"priority": 2}'); END $$`,
	} {
		b.exec(b.pool, change)
		v := version()
		if v != version() {
			t.Fatalf("the registry version changes without a change of a queue")
		}
		if before, known := seen[v]; known {
			t.Errorf("the registry version %d after\n%s\nis that after\n%s", v, change, before)
		}
		seen[v] = change
	}
}

// A drop needs the table of all entries and that of its queue. Other transactions lock the two in either order: none of
// them is the victim of a deadlock with it.
func TestADropDoesNotWaitInACircle(t *testing.T) {
	for name, first := range map[string]string{
		"all entries first":      `LOCK TABLE ONLY penstock.entry IN ACCESS SHARE MODE`,
		"those of a queue first": `SELECT FROM penstock.entry_dropped`,
		"a counter of it first":  `SELECT penstock.count(id, 'accepted', 1) FROM penstock.queue WHERE name = 'dropped'`, // as a push
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			if _, err := Create(b.ctx, b.pool, "dropped", Config{Capacity: 10}); err != nil {
				t.Fatal(err)
			}
			other := b.begin()
			b.exec(other, first)
			dropped := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, "dropped", false, By{}) })
			b.awaitBlocked(other)
			b.exec(other, `SELECT FROM penstock.entry`)
			b.commit(other)
			dropped()
		})
	}
}

// A push that has locked the table of the queue's entries, for which a drop waits, does not wait for rows that the drop has
// deleted.
func TestAPushDoesNotWaitForADropThatWaitsForIt(t *testing.T) {
	for name, push := range map[string]string{
		"lock key":        `SELECT penstock.push('work', '1', lock_key => 'k')`,
		"idempotency key": `SELECT penstock.push('work', '1', idempotency_key => 'k')`,
		"unique key":      `SELECT penstock.push('work', '1', unique_key => 'k', unique_policy => 'while_active')`,
	} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{})
			b.exec(b.pool, push)
			other := b.begin()
			b.exec(other, `SET LOCAL lock_timeout = '500ms'`)
			b.exec(other, `SELECT penstock.push('work', '1')`)
			dropped := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, "work", true, By{}) })
			b.awaitBlocked(other)
			b.exec(other, push)
			b.commit(other)
			dropped()
			if n := b.count(`SELECT count(*) FROM penstock.ready`); n != 0 {
				t.Errorf("%d ready rows of the dropped queue are left", n)
			}
			if _, _, err := new(Tidier).Tidy(b.ctx, inTxOf(b.pool), 100); err != nil {
				t.Error(err)
			}
			if n := b.count(`SELECT count(*) FROM penstock.uniqueness`); n != 0 {
				t.Errorf("%d unique keys of the dropped queue are left", n)
			}
		})
	}
}

// Unique keys of a dropped queue stayed until the sweep. One that another transaction has locked is left to it.
func TestADropDeletesTheUniqueKeysThatAreFree(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.push('work', '1', unique_key => 'k' || n, unique_policy => 'while_active') FROM generate_series(1, 3) n`)
	other := b.begin()
	b.exec(other, `SELECT FROM penstock.uniqueness WHERE key = 'k1' FOR UPDATE`)
	b.must(Drop(b.ctx, b.pool, "work", true, By{}))
	if n := b.count(`SELECT count(*) FROM penstock.uniqueness`); n != 1 {
		t.Errorf("%d unique keys of the dropped queue are left, want the one that is locked", n)
	}
}

// The ending of an entry makes its lock key ready, at the position of a ready row that a push has inserted meanwhile: it does
// not wait for a drop that has deleted this row.
func TestAnEndingDoesNotWaitForADropThatWaitsForIt(t *testing.T) {
	b := newControlBed(t, Config{})
	b.push("k")
	l := b.claim(1)[0]
	b.push("k")
	other := b.begin()
	b.exec(other, `SET LOCAL lock_timeout = '500ms'`)
	b.exec(other, `SELECT FROM penstock.entry`)
	dropped := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, "work", true, By{}) })
	b.awaitBlocked(other)
	if _, err := b.q.WithTx(other).Settle(b.ctx, here, []Ending{last(Done(l, l.Entries[0].ID, nil, 0))}); err != nil {
		t.Fatal(err)
	}
	b.commit(other)
	dropped()
}

// A queue may have millions of results, idempotency keys and ready rows. While they are deleted, others push, and change other queues.
func TestADropDeletesRowsBeforeItLocksEntries(t *testing.T) {
	for table, rows := range map[string]string{
		"result": `INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome) SELECT id, 0, now(), 1, 'done'
		             FROM penstock.queue WHERE name = 'work'`,
		"idempotency": `SELECT penstock.push('work', '1', idempotency_key => 'k')`,
		"ready":       `SELECT penstock.push('work', '1')`,
	} {
		t.Run(table, func(t *testing.T) {
			b := newControlBed(t, Config{})
			b.exec(b.pool, rows)
			b.exec(b.pool, `SELECT penstock.create_queue('other')`)
			slow := b.begin()
			b.exec(slow, `SELECT FROM penstock.`+table+` FOR UPDATE`)
			done := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, b.q.Name, true, By{}) })
			b.awaitBlocked(slow)
			other := b.begin()
			b.exec(other, `SET LOCAL lock_timeout = '1s'`)
			b.exec(other, `SELECT penstock.push('other', '1'), penstock.alter_queue('other', '{"priority": 2}')`)
			b.commit(other)
			b.commit(slow)
			done()
			if n := b.count(`SELECT count(*) FROM penstock.` + table + ` WHERE queue_id <> (SELECT id FROM penstock.queue WHERE name = 'other')`); n != 0 {
				t.Errorf("%d rows of the dropped queue are left", n)
			}
		})
	}
}

// A queue that was dropped and made again while a drop waited was left without its table.
func TestADropThatWaitedDropsTheQueueThatIsThereNow(t *testing.T) {
	b := newControlBed(t, Config{})
	first := b.begin()
	b.exec(first, `SELECT penstock.drop_queue('work', true)`)
	b.exec(first, `SELECT penstock.create_queue('work')`)
	second := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, "work", true, By{}) })
	b.awaitBlocked(first)
	b.commit(first)
	second()
	if n := b.count(`SELECT count(*) FROM penstock.queue WHERE name = 'work'`); n != 0 {
		t.Errorf("the queue is still there")
	}
}
