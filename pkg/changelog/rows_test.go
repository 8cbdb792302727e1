package changelog

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
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

// The row of an UPDATE is compared with itself, also where other rows have its key, as the lines of an order do.
func TestRowsWithOneKeyAreComparedOneByOne(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE line (id int PRIMARY KEY, order_id int, price int)`)
	b.watchTable("line", []string{"price"}, "order_id")
	b.exec(`INSERT INTO line VALUES (1, 7, 10), (2, 7, 20), (3, 7, 30)`)
	b.changes()
	b.exec(`UPDATE line SET price = price + 1`)
	got := b.changes()
	slices.Sort(got)
	if want := []string{`7.price: 10 -> 11`, `7.price: 20 -> 21`, `7.price: 30 -> 31`}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
	b.exec(`UPDATE line SET order_id = 8 WHERE id = 1`)
	b.wantChanges(`7.: {"price": 11} -> null`, `8.: null -> {"price": 11}`)

	b.exec(`CREATE TABLE loose (kind text, n int)`) // without a primary key
	b.watchTable("loose", nil, "kind")
	b.exec(`INSERT INTO loose SELECT 'a', i FROM generate_series(1, 200) i`)
	b.changes()
	b.exec(`UPDATE loose SET n = n + 1000`)
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes
	                  WHERE (payload->>'to')::int = (payload->>'from')::int + 1000`); n != 200 {
		t.Errorf("%d rows were compared with themselves, want 200", n)
	}
	if got := b.changes(); len(got) != 200 {
		t.Errorf("%d changes of 200 rows", len(got))
	}
}

// Rows without a key are compared with themselves like others.
func TestARowWhoseKeyIsNullIsComparedWithItself(t *testing.T) {
	b := newBed(t)
	for _, c := range []struct{ table, columns, keys, first, second string }{
		{"line", "id int PRIMARY KEY, k int", "k", "(1, NULL, 10, 0)", "(2, NULL, 20, 0)"},
		{"pair", "id int PRIMARY KEY, k int, l text", "k l", "(1, 5, NULL, 10, 0)", "(2, NULL, 'x', 20, 0)"},
		{"uniq", "id int PRIMARY KEY, k text UNIQUE", "k", "(1, NULL, 10, 0)", "(2, NULL, 20, 0)"},
		{"loose", "id int, k bit(3)", "k", "(1, NULL, 10, 0)", "(2, NULL, 20, 0)"}, // of a type that has no hash
		{"fields", "id int, k xid, l jsonb", "k l", "(1, NULL, NULL, 10, 0)", "(2, '7', NULL, 20, 0)"},
	} {
		b.exec(`CREATE TABLE ` + c.table + ` (` + c.columns + `, price int, other int)`)
		b.watchTable(c.table, []string{"price"}, strings.Fields(c.keys)...)
		b.exec(`INSERT INTO ` + c.table + ` VALUES ` + c.first + `, ` + c.second)
		b.changes()
		b.exec(`UPDATE ` + c.table + ` SET other = 1`)
		if got := b.changes(); len(got) != 0 {
			t.Errorf("%s: an update of a column that is not watched recorded %q", c.table, got)
		}
		b.exec(`UPDATE ` + c.table + ` SET price = price + 1`)
		got := b.changes()
		slices.Sort(got)
		if len(got) != 2 || !strings.Contains(got[0]+got[1], ".price: 10 -> 11") ||
			!strings.Contains(got[0]+got[1], ".price: 20 -> 21") {
			t.Errorf("%s: recorded %q, want one change of the price of each row", c.table, got)
		}
	}
	b.exec(`UPDATE line SET k = 7 WHERE id = 1`)
	b.wantChanges(`null.: {"price": 11} -> null`, `7.: null -> {"price": 11}`)
}

// A key that identifies a row and is not declared unique, since an index of a partitioned table has to have its
// partition key.
func TestARowThatMovesToAnotherPartitionIsTheSameObject(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE client (id int, region text, v int, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
		CREATE TABLE client_eu PARTITION OF client FOR VALUES IN ('eu');
		CREATE TABLE client_us PARTITION OF client FOR VALUES IN ('us')`)
	b.watchTable("client", []string{"region", "v"}, "id")
	b.exec(`INSERT INTO client VALUES (1, 'eu', 1), (2, 'eu', 1)`)
	b.changes()
	b.exec(`UPDATE client SET region = 'us', v = 2 WHERE id = 1`)
	b.wantChanges(`1.region: "eu" -> "us"`, `1.v: 1 -> 2`)
	b.exec(`CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TRIGGER nothing BEFORE INSERT ON client_eu FOR EACH ROW EXECUTE FUNCTION nothing()`)
	b.exec(`UPDATE client SET region = 'eu' WHERE id = 1`) // the trigger ends the row
	b.wantChanges(`1.: {"v": 2, "region": "us"} -> null`)
}

// Only TRUNCATE is the change of all objects: a handler empties its cache for it.
func TestARowWithoutAKeyIsNoTruncatedTable(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE line (id int PRIMARY KEY, order_id int, price int)`)
	b.watchTable("line", []string{"price"}, "order_id")
	b.exec(`INSERT INTO line VALUES (1, NULL, 10)`)
	b.exec(`DELETE FROM line`)
	b.exec(`TRUNCATE line`)
	var truncated []bool
	_, err := b.run("changes", Handler(b.pool, func(_ context.Context, c Change) ([]Push, error) {
		truncated = append(truncated, c.Truncated())
		return nil, nil
	}))
	if want := []bool{false, false, true}; err != nil || !slices.Equal(truncated, want) {
		t.Errorf("truncated: %v, want %v; %v", truncated, want, err)
	}
}

// An object that is called otherwise from now on is another one for those that know it by its name, though the
// collation of the key calls them equal.
func TestAKeyThatOnlyItsCollationCallsEqualHasChanged(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		CREATE TABLE city (name text COLLATE folded PRIMARY KEY, v int)`)
	b.watchTable("city", nil)
	b.exec(`INSERT INTO city VALUES ('bonn', 1)`)
	b.changes()
	b.exec(`UPDATE city SET name = 'Bonn'`)
	b.wantChanges(`"bonn".: {"v": 1} -> null`, `"Bonn".: null -> {"v": 1}`)
	b.exec(`UPDATE city SET v = 2`)
	b.wantChanges(`"Bonn".v: 1 -> 2`)
}

// A watch that cannot compare keys would fail each UPDATE of the table.
func TestKeysOfTypesWithoutEqualityAreCompared(t *testing.T) {
	b := newBed(t)
	for column, value := range map[string]string{
		"point": `'(1,2)'`, "box": `'(1,2),(0,0)'`, "xml": `'<a/>'`, "json[]": `ARRAY['1'::json]`, "int2vector": `'1 2'`,
	} {
		b.exec(`CREATE TABLE place (k ` + column + `, v int)`)
		b.watchTable("place", nil, "k")
		b.exec(`INSERT INTO place VALUES (` + value + `, 1)`)
		b.changes()
		b.exec(`UPDATE place SET v = 2`)
		if got := b.changes(); len(got) != 1 {
			t.Errorf("a key of type %s: %q", column, got)
		}
		b.exec(`DROP TABLE place`)
	}
}

// What is left out of a change is not converted for it: jsonb holds no text of more than 256 MB.
func TestUnracedAValueThatIsLeftOutIsNotConverted(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE DOMAIN long AS text; CREATE TABLE file (id int PRIMARY KEY, body bytea, about long, n int)`)
	b.exec(`INSERT INTO file VALUES (1, convert_to(repeat('x', 140 << 20), 'UTF8'), repeat('y', 9000), 1)`)
	b.watchTable("file", nil)
	b.exec(`UPDATE file SET n = 2`)
	b.wantChanges(`1.n: 1 -> 2`)
	b.exec(`UPDATE file SET about = repeat('z', 9000)`)
	b.wantChanges(`1.about: {"omitted": 9000} -> {"omitted": 9000}`)
	b.exec(`DELETE FROM file`)
	if got := b.changes(); len(got) != 1 {
		t.Fatalf("a row that went recorded %d changes", len(got))
	} else if want := `1.: {"n": 2, "body": {"omitted": 146800640}, "about": {"omitted": 9000}} -> null`; got[0] != want {
		t.Errorf("recorded %.200s, want %s", got[0], want)
	}
}

// Triggers add columns of their own to the rows of a statement. Each UPDATE of a table that has columns of these names
// would be refused.
func TestColumnsOfATableMayHaveAnyNames(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE odd (id int PRIMARY KEY, penstock_here int, penstock_place int, penstock_rank int, o int, n int,
		f int, r int, c int, field int, was int, became int, differs int)`)
	for _, key := range []string{"id", "penstock_rank"} { // the second is not unique
		b.watchTable("odd", nil, key)
		b.exec(`INSERT INTO odd VALUES (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)`)
		b.changes()
		b.exec(`UPDATE odd SET penstock_here = 2, penstock_place = NULL, n = NULL, was = 2`)
		b.exec(`UPDATE odd SET penstock_here = NULL, differs = 2`)
		b.wantChanges(`1.penstock_here: 1 -> 2`, `1.penstock_place: 1 -> null`, `1.n: 1 -> null`, `1.was: 1 -> 2`,
			`1.penstock_here: 2 -> null`, `1.differs: 1 -> 2`)
		b.exec(`DELETE FROM odd`)
		b.changes()
	}
}

// Actions of foreign keys may update a row more than once for one statement, whose triggers get each version of it.
func TestARowThatTwoForeignKeysUpdateIsRecordedOnce(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE person (id int PRIMARY KEY);
		CREATE TABLE task (id int PRIMARY KEY, author int REFERENCES person ON DELETE SET NULL,
			owner int REFERENCES person ON DELETE SET NULL);
		INSERT INTO person VALUES (1); INSERT INTO task VALUES (7, 1, 1), (8, NULL, 1)`)
	b.watchTable("task", nil)
	b.exec(`DELETE FROM person`)
	got := b.changes()
	slices.Sort(got)
	if want := []string{`7.author: 1 -> null`, `7.owner: 1 -> null`, `8.owner: 1 -> null`}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
}

// Triggers do not see values of virtual generated columns: a change of one would be recorded as from null to null, or
// not at all.
func TestAVirtualGeneratedColumnIsNotWatched(t *testing.T) {
	b := newBed(t)
	if b.count(`SELECT current_setting('server_version_num')::int`) < 180000 {
		t.Skip("Postgres before 18 has no virtual generated columns")
	}
	b.exec(`CREATE TABLE price (id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) VIRTUAL,
		tax int GENERATED ALWAYS AS (net / 2) STORED)`)
	b.watchTable("price", nil)
	b.exec(`INSERT INTO price VALUES (1, 10)`)
	b.exec(`UPDATE price SET net = 20`)
	b.wantChanges(`1.: null -> {"net": 10, "tax": 5}`, `1.net: 10 -> 20`, `1.tax: 5 -> 10`)
	for _, c := range []struct{ columns, keys []string }{
		{[]string{"gross"}, nil}, {[]string{"net"}, []string{"gross"}},
	} {
		err := Watch(b.ctx, b.pool, "price", "changes", c.columns, c.keys, invalidation.By{})
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "virtual") {
			t.Errorf("columns %q by keys %q: %v, want that the column is refused", c.columns, c.keys, err)
		}
	}
}

// Equal numbers are one object, with one lock key, however many zeros they were written with.
func TestAKeyOfANumberHasOneLockKey(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE DOMAIN size AS numeric; CREATE TABLE shoe (size numeric PRIMARY KEY, v int);
		CREATE TABLE boot (size size, width numeric, v int)`)
	b.watchTable("shoe", nil)
	b.watchTable("boot", []string{"v"}, "size", "width")
	b.exec(`INSERT INTO shoe VALUES (10.50, 1), (100, 1), ('NaN', 1); INSERT INTO boot VALUES (1.0, 2.00, 1)`)
	b.exec(`UPDATE shoe SET size = 10.500, v = 2 WHERE size = 10.5; UPDATE boot SET size = 1, width = 2, v = 2`)
	if n := b.count(`SELECT count(DISTINCT lock_key) FROM penstock.entry_changes`); n != 4 {
		t.Errorf("the changes of 4 rows have %d lock keys", n)
	}
	b.wantChanges(`10.5.: null -> {"v": 1}`, `100.: null -> {"v": 1}`, `"NaN".: null -> {"v": 1}`,
		`{"size": 1, "width": 2}.: null -> {"v": 1}`, `10.5.v: 1 -> 2`, `{"size": 1, "width": 2}.v: 1 -> 2`)
}
