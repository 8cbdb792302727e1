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
