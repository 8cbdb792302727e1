package migrations_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// A table that is not in the list of docs/sizing.md may have rows that nothing deletes.
func TestWhatDeletesFromEachTableIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/sizing.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n### What deletes from each table\n")
	var listed []string
	for _, row := range regexp.MustCompile(`(?m)^\| (`+"`"+`.*?) \|`).FindAllStringSubmatch(section, -1) {
		for _, name := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			listed = append(listed, name[1])
		}
	}
	slices.Sort(listed)
	c := connect(t, pgtest.DSN(t))
	tables := query[[]string](t, c, `SELECT array_agg(relname::text ORDER BY relname COLLATE "C") FROM pg_class
		WHERE relnamespace = 'penstock'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition`)
	for _, name := range tables {
		if !slices.Contains(listed, name) {
			t.Errorf("docs/sizing.md does not say what deletes from %s", name)
		}
	}
	for i, name := range listed {
		if !slices.Contains(tables, name) || i > 0 && listed[i-1] == name {
			t.Errorf("docs/sizing.md has %s, which is no table, or has it twice", name)
		}
	}
}

// Ids of instances and limits are integers: a program that registers a thousand instances again each ten seconds would
// have drawn all of them in 248 days, and none could be registered any more.
func TestChangesOfWhatIsThereDrawNoId(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	const change = `SELECT penstock.register_instance('m', 'gpu-1', 'http://127.0.0.1:9', 2, '{"zone": "a"}'),
		penstock.set_limit('l', '{"max_units": 3}'), penstock.set_limit('r', '{"rate": 2, "per_flow": true}')`
	exec(t, c, `SELECT penstock.register_model('m', '{"protocol": "dispatcher"}')`)
	exec(t, c, change)
	drawn := func() int64 {
		return query[int64](t, c, `SELECT sum(last_value)::bigint FROM pg_sequences
			WHERE schemaname = 'penstock' AND sequencename IN ('instance_id_seq', 'limit_id_seq')`)
	}
	before, state := drawn(), `SELECT string_agg(i::text || g::text, ' ' ORDER BY g.id) FROM
		(SELECT id, server, endpoint, slots, labels FROM penstock.instance) i, (SELECT * FROM penstock."limit") g`
	was := query[string](t, c, state)
	for range 3 {
		exec(t, c, change)
	}
	if n := drawn() - before; n != 0 {
		t.Errorf("changes of what is there drew %d ids", n)
	}
	if is := query[string](t, c, state); is != was {
		t.Errorf("registered and set again it is %s, want %s", is, was)
	}
}
