package migrations_test

import (
	"io/fs"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

var (
	// PS9xx never leaves the function that raises it.
	raisedPattern = regexp.MustCompile(`'(PS0\d{2})'`)
	rowPattern    = regexp.MustCompile("(?m)^\\| `(PS\\d{3})` \\|")
)

// The table of errors in docs/sql.md has the SQLSTATEs of class PS that functions raise, and no others.
func TestEveryErrorOfTheSchemaIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, row := range rowPattern.FindAllStringSubmatch(string(page), -1) {
		documented[row[1]] = true
	}
	files, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	raised := map[string]bool{}
	for name := range files {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range raisedPattern.FindAllStringSubmatch(string(text), -1) {
			if raised[found[1]] = true; !documented[found[1]] {
				t.Errorf("%s raises %s, for which docs/sql.md has no row", name, found[1])
			}
		}
	}
	for code := range documented {
		if !raised[code] {
			t.Errorf("docs/sql.md has a row for %s, which nothing raises", code)
		}
	}
	if len(raised) == 0 {
		t.Error("found no SQLSTATE in migrations/functions")
	}
}

// The language of messages decides what quotes stand around the name of a constraint.
func TestAViolatedConstraintIsPutIntoWordsInEachLanguage(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	for said, want := range map[string]string{
		`new row for relation "limit" violates check constraint "limit_check1"`:             "neither max_units nor rate is given",
		`neue Zeile für Relation »cron_job« verletzt Check-Constraint »cron_job_gap_check«`: "gap is not fire or skip",
		`la nouvelle ligne de la relation « limit » viole la contrainte « limit_check »`:    "rate and burst are not given together",
		`value too long`: "value too long",
		`invalid input syntax for type integer: "limit_name_check limit_rate_check"`: "name is empty", // a user's text
	} {
		var got string
		if err := c.QueryRow(t.Context(), `SELECT penstock.in_words($1)`, said).Scan(&got); err != nil || got != want {
			t.Errorf("%s: %q, want %q (%v)", said, got, want, err)
		}
	}
}

const verbsSQL = `
SELECT DISTINCT proname::text FROM pg_catalog.pg_proc
 WHERE pronamespace = 'penstock'::regnamespace AND proargnames @> '{reason,actor}' ORDER BY 1`

// A function that takes a reason and an actor is a verb of operators, and docs/sql.md has it.
func TestEveryVerbIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	verbs, err := pgx.CollectRows(mustQuery(t, connect(t, pgtest.DSN(t)), verbsSQL), pgx.RowTo[string])
	if err != nil || len(verbs) == 0 {
		t.Fatalf("read the verbs: %v, %v", verbs, err)
	}
	parts := []string{"audit_log", "audit_pause", "begin_operation", "replaced_pause", "switch_entries", "switch_entry"} // of the verbs themselves
	documented := documentedPattern.FindAllStringSubmatch(string(page), -1)
	for _, verb := range verbs {
		if !slices.Contains(parts, verb) && !slices.ContainsFunc(documented, func(row []string) bool { return row[1] == verb }) {
			t.Errorf("docs/sql.md has no row for penstock.%s", verb)
		}
	}
}

func mustQuery(t *testing.T, c *pgx.Conn, sql string) pgx.Rows {
	t.Helper()
	rows, err := c.Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}
