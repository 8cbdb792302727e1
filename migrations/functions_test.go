package migrations_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

var (
	callPattern       = regexp.MustCompile(`penstock\.(\w+)`)
	documentedPattern = regexp.MustCompile("(?m)^\\| `penstock\\.(\\w+)\\(")
	linePattern       = regexp.MustCompile(`(?m)--.*$`)
)

// A function is used by Go code that is not a test, by another function, a view, a trigger or a default, or it is part
// of the SQL API of docs/sql.md.
func TestNoFunctionIsUnused(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	used := map[string]bool{"count_matching_to": true} // by dashboards of the version before
	note := func(text string) {
		for _, found := range callPattern.FindAllStringSubmatch(text, -1) {
			used[found[1]] = true
		}
	}
	noteGoFiles(t, note)
	functions := map[string]bool{}
	for object, definition := range mustCatalog(t, c) {
		kind, name, _ := strings.Cut(object, " ")
		if kind != "function" {
			note(definition)
			continue
		}
		name, _, _ = strings.Cut(strings.TrimPrefix(name, "penstock."), "(")
		functions[name] = true
		text := linePattern.ReplaceAllString(definition, "")
		note(strings.Replace(text, "penstock."+name, "", 1)) // its own head
	}
	api, err := os.ReadFile("../docs/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range documentedPattern.FindAllStringSubmatch(string(api), -1) {
		used[found[1]] = true
		if !functions[found[1]] {
			t.Errorf("docs/sql.md has penstock.%s, which does not exist", found[1])
		}
	}
	for name := range functions {
		if !used[name] {
			t.Errorf("nothing calls penstock.%s, and it is not in docs/sql.md", name)
		}
	}
}

// noteGoFiles passes the text of every Go file of the product to note.
func noteGoFiles(t *testing.T, note func(string)) {
	t.Helper()
	for _, root := range []string{"../cmd", "../pkg", "../internal"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			note(string(text))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Functions are created without a look at their bodies, since files refer to one another. This is that look.
func TestEveryFunctionBodyIsValid(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	rows, _ := c.Query(t.Context(), `
		SELECT p.oid::regprocedure::text, format('SELECT %s(%s)', l.lanvalidator::regproc, p.oid)
		  FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
		 WHERE p.pronamespace = 'penstock'::regnamespace`)
	type check struct{ Function, SQL string }
	checks, err := pgx.CollectRows(rows, pgx.RowToStructByPos[check])
	if err != nil || len(checks) < 100 {
		t.Fatalf("%d functions (%v)", len(checks), err)
	}
	for _, f := range checks {
		if _, err := c.Exec(t.Context(), f.SQL); err != nil {
			t.Errorf("%s: %v", f.Function, err)
		}
	}
}

// Each function, view and trigger stands once, so that whoever changes the text changes what runs.
func TestEachFunctionStandsOnce(t *testing.T) {
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	pattern := regexp.MustCompile(`(?im)^\s*CREATE\s+(?:OR REPLACE\s+)?(FUNCTION|VIEW|TRIGGER)\s+([\w.]+)(.*)`)
	seen := map[string]string{}
	for name, file := range functions {
		for _, found := range pattern.FindAllStringSubmatch(string(file.Data), -1) {
			what := found[1] + " " + found[2]
			if found[1] == "TRIGGER" {
				what += onPattern.FindString(found[3])
			}
			if other, twice := seen[what]; twice {
				t.Errorf("%s stands in %s and in %s", what, other, name)
			}
			seen[what] = name
		}
	}
	if len(seen) < 200 {
		t.Errorf("found only %d", len(seen))
	}
}

var onPattern = regexp.MustCompile(` ON \S+`)

// With standard_conforming_strings = off, as a session of psql may have it, a backslash in a plain literal is an escape.
func TestLiteralsWithABackslashSayThatItIsAnEscape(t *testing.T) {
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	literal := regexp.MustCompile(`(\w?)'((?:[^']|'')*)'`)
	seen := 0
	for name, file := range functions {
		for _, found := range literal.FindAllStringSubmatch(linePattern.ReplaceAllString(string(file.Data), ""), -1) {
			if !strings.Contains(found[2], `\`) {
				continue
			}
			seen++
			if found[1] != "E" {
				t.Errorf("%s: %s", name, found[0])
			}
		}
	}
	if seen == 0 {
		t.Error("no literal with a backslash was found: the test shows nothing")
	}
}

// Rows of an hour or day begin in UTC; the hours of a zone may begin at half past.
func TestHoursAndDaysOfFunctionsBeginInUTC(t *testing.T) {
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for name, file := range functions {
		text := string(file.Data)
		for _, at := range truncPattern.FindAllStringIndex(text, -1) {
			seen++
			call := text[at[0]:at[1]]
			for end := at[1]; strings.Count(call, "(") > strings.Count(call, ")"); end++ {
				call += text[end : end+1]
			}
			if !strings.HasSuffix(call, ", 'UTC')") {
				t.Errorf("%s: no zone in %s", name, call)
			}
		}
	}
	if seen == 0 {
		t.Error("no beginning of an hour was found: the test shows nothing")
	}
}

var truncPattern = regexp.MustCompile(`date_trunc\('(hour|day)',`)

// withFile is a program with one more file of functions.
func withFile(t *testing.T, text string) fstest.MapFS {
	t.Helper()
	functions, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	functions["functions/added.sql"] = &fstest.MapFile{Data: []byte(text)}
	return functions
}

// A call that two forms of a function could take is refused as ambiguous: an upgrade leaves the new form, and the way back
// that docs/deployment.md has leaves the old one.
func TestAFunctionWithAnotherArgumentHasOneForm(t *testing.T) {
	dsn := pgtest.DSN(t)
	c := connect(t, dsn)
	const release = migrations.Release
	greets := func(when, want string) {
		t.Helper()
		got := query[string](t, c, `
SELECT string_agg(a.text, '; ' ORDER BY a.text COLLATE "C")
  FROM (SELECT pg_get_function_arguments(oid) FROM pg_proc WHERE proname = 'greet') a(text)`)
		if got != want {
			t.Errorf("%s: the forms of the function take %q, want %q", when, got, want)
		}
	}
	old := func(mend string) fstest.MapFS {
		return withFile(t, `CREATE OR REPLACE FUNCTION penstock.greet(name text) RETURNS int LANGUAGE sql AS 'SELECT 1'; -- `+mend)
	}
	longer := withFile(t, `
CREATE OR REPLACE FUNCTION penstock.greet(name text, loud boolean DEFAULT false) RETURNS int LANGUAGE sql AS 'SELECT 2';
CREATE OR REPLACE FUNCTION penstock.greet(name integer) RETURNS int LANGUAGE sql AS 'SELECT 3';`)
	exec(t, c, `CREATE FUNCTION penstock.greet(mine date) RETURNS int LANGUAGE sql AS 'SELECT 4'`)
	upWith(t, dsn, old("as released"), release)
	greets("before", "mine date; name text")
	upWith(t, dsn, longer, release+1)
	greets("after the upgrade", "mine date; name integer; name text, loud boolean DEFAULT false")
	exec(t, c, `DELETE FROM penstock.schema_version`)
	upWith(t, dsn, old("mended"), release)
	greets("on the way back", "mine date; name text")
	upWith(t, dsn, longer, release+1)
	greets("deployed again", "mine date; name integer; name text, loud boolean DEFAULT false")
}
