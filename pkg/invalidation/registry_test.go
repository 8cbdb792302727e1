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
