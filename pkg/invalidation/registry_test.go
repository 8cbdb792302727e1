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
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			if _, err := Create(b.ctx, b.pool, "dropped", Config{}); err != nil {
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

// A queue may have millions of results and failures: nobody waits until they are deleted.
func TestADropDeletesResultsBeforeItLocksEntries(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "")
	for _, l := range b.claim(2) {
		b.settle(last(Done(l, l.Entries[0].ID, nil, 0)))
	}
	slow := b.begin()
	b.exec(slow, `SELECT FROM penstock.result FOR UPDATE`)
	done := later(b, func() (bool, error) { return true, Drop(b.ctx, b.pool, b.q.Name, false, By{}) })
	b.awaitBlocked(slow)
	reader := b.begin()
	b.exec(reader, `SET LOCAL lock_timeout = '1s'`)
	b.exec(reader, `SELECT FROM penstock.entry`)
	b.commit(reader)
	b.commit(slow)
	done()
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 0 {
		t.Errorf("%d results of the dropped queue are left", n)
	}
}
