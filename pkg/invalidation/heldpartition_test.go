package invalidation

import "testing"

// A session that reads an old partition keeps its table from being tidied, and no other.
func TestAHeldPartitionStopsTheRetentionOfItsTableOnly(t *testing.T) {
	b := newBed(t, Config{})
	for _, partition := range []string{"sample_20200101", "sample_20200102", "result_20200103"} {
		day := partition[len(partition)-8:]
		b.exec(b.pool, `CREATE TABLE penstock.`+partition+` PARTITION OF penstock.`+partition[:len(partition)-9]+
			` FOR VALUES FROM ('`+day+`') TO ('`+day+` 24:00')`)
	}
	const left = `SELECT count(*) FROM pg_class WHERE relname ~ '_2020010[1-3]$' AND relkind = 'r'`
	reader := b.begin()
	b.exec(reader, `SELECT FROM penstock.sample_20200101`)
	if n, err := DropOldPartitions(b.ctx, inTxOf(b.pool)); n != 1 || err != nil {
		t.Errorf("dropped %d (%v), want the one that is behind the held ones", n, err)
	}
	b.want(b.count(left), 2)
	b.commit(reader)
	if n, err := DropOldPartitions(b.ctx, inTxOf(b.pool)); n != 2 || err != nil {
		t.Errorf("dropped %d (%v) after the reader, want 2", n, err)
	}
	b.want(b.count(left), 0)
}
