package changelog

import (
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// watchTable watches a table of the test's own, by keys where some are given.
func (b *bed) watchTable(table string, columns []string, keys ...string) {
	b.Helper()
	if len(keys) == 0 {
		keys = nil
	}
	if err := Watch(b.ctx, b.pool, table, "changes", columns, keys, invalidation.By{}); err != nil {
		b.Fatal(err)
	}
}

// Two writers name an object alike, however their sessions print values, or the changes of the object would have two
// lock keys; and no setting hides a change.
func TestAChangeIsTheSameFromEachSession(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE reading (at timestamptz PRIMARY KEY, period tstzrange, lasts interval, raw bytea, value float8)`)
	b.watchTable("reading", nil)
	b.exec(`BEGIN; SET LOCAL TimeZone = 'Asia/Kolkata'; SET LOCAL DateStyle = 'SQL, DMY'; SET LOCAL IntervalStyle = iso_8601;
		SET LOCAL bytea_output = escape; SET LOCAL extra_float_digits = -2;
		INSERT INTO reading VALUES ('2026-01-31 00:00Z', '[2026-01-31 00:00Z,2026-02-01 00:00Z)', '1 day 02:00', '\x00ff', 0.3);
		UPDATE reading SET value = 0.1::float8 + 0.2::float8; COMMIT`)
	at := `"2026-01-31T00:00:00+00:00".`
	b.wantChanges(at+`: null -> {"raw": "\\x00ff", "lasts": "1 day 02:00:00", "value": 0.3, `+
		`"period": "[\"2026-01-31 00:00:00+00\",\"2026-02-01 00:00:00+00\")"}`,
		at+`value: 0.3 -> 0.30000000000000004`)
}
