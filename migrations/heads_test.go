package migrations_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/migrations"
)

// definition is one CREATE statement of migrations/functions with the comment block directly above it.
type definition struct {
	file, kind, name string
	head             string // without the comment marks, lines joined by blanks
	text             string // up to the next definition, without comments
}

var (
	definitionPattern = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?(FUNCTION|VIEW|TRIGGER) (?:penstock\.)?(\w+)`)
	readOnlyPattern   = regexp.MustCompile(`\b(STABLE|IMMUTABLE)\b`)
	sqlstatePattern   = regexp.MustCompile(`ERRCODE = '(\w+)'`)
	callersPattern    = regexp.MustCompile(`Callers: (.*?)(?: SQLSTATE: |$)`)
	sqlPattern        = regexp.MustCompile(`\bpenstock\.\w|SELECT |force =>`)
	callerPattern     = regexp.MustCompile(`[\w/]+`)
)

// conditions gives the SQLSTATE of the condition names that functions raise.
var conditions = map[string]string{"serialization_failure": "40001", "insufficient_privilege": "42501"}

func definitions(t *testing.T) []definition {
	t.Helper()
	files, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	var all []definition
	for name, file := range files {
		text := string(file.Data)
		found := definitionPattern.FindAllStringSubmatchIndex(text, -1)
		for i, at := range found {
			end := len(text)
			if i+1 < len(found) {
				end = found[i+1][0]
			}
			all = append(all, definition{
				file: name, kind: text[at[2]:at[3]], name: text[at[4]:at[5]],
				head: headOf(text[:at[0]]), text: linePattern.ReplaceAllString(text[at[0]:end], ""),
			})
		}
	}
	if len(all) < 200 {
		t.Fatalf("found only %d definitions", len(all))
	}
	return all
}

// headOf joins the comment lines that a text ends in.
func headOf(before string) string {
	lines := strings.Split(strings.TrimSuffix(before, "\n"), "\n")
	first := len(lines)
	for first > 0 && strings.HasPrefix(lines[first-1], "--") {
		first--
	}
	var head []string
	for _, line := range lines[first:] {
		head = append(head, strings.TrimSpace(strings.TrimPrefix(line, "--")))
	}
	return strings.Join(head, " ")
}

// The head of a definition begins with its name. That of a function or view names its callers; that of a function that
// may write, its locks; and that of a function that raises an error, the SQLSTATE.
func TestEveryDefinitionHasAHead(t *testing.T) {
	for _, d := range definitions(t) {
		for _, flaw := range headFlaws(d) {
			t.Errorf("%s %s in %s: %s", strings.ToLower(d.kind), d.name, d.file, flaw)
		}
	}
}

func headFlaws(d definition) (flaws []string) {
	if !strings.HasPrefix(d.head, d.name) {
		flaws = append(flaws, "no comment directly above it begins with its name")
	}
	if d.kind == "TRIGGER" {
		return flaws
	}
	if !callersPattern.MatchString(d.head) {
		flaws = append(flaws, `its head has no line "Callers:"`)
	}
	if d.kind == "VIEW" {
		return flaws
	}
	declaration, body, _ := strings.Cut(d.text, "AS $")
	if !readOnlyPattern.MatchString(declaration) && !strings.Contains(d.head, "Locks: ") {
		flaws = append(flaws, `it may write, and its head has no line "Locks:"`)
	}
	_, states, _ := strings.Cut(d.head, "SQLSTATE: ")
	for _, found := range sqlstatePattern.FindAllStringSubmatch(body, -1) {
		state := found[1]
		if code, named := conditions[state]; named {
			state = code
		}
		// make_watch_function makes functions with errors of their own, which its description names.
		if !strings.Contains(states, state) && !strings.Contains(d.head, "(SQLSTATE "+state+")") {
			flaws = append(flaws, "it raises "+state+", which its head does not name")
		}
	}
	return flaws
}

// A caller that a head names exists and mentions the function: so the lists do not outlive a call. A call that a head
// leaves out is not found.
func TestCallersOfHeadsCall(t *testing.T) {
	all := definitions(t)
	texts := goPackages(t)
	for _, d := range all {
		texts[d.name] += d.text
	}
	for _, d := range all {
		for _, flaw := range callerFlaws(d, texts) {
			t.Errorf("%s in %s: %s", d.name, d.file, flaw)
		}
	}
}

func callerFlaws(d definition, texts map[string]string) (flaws []string) {
	found := callersPattern.FindStringSubmatch(d.head)
	if found == nil {
		return nil
	}
	mention := regexp.MustCompile(`\b` + d.name + `\b`)
	for _, caller := range callerPattern.FindAllString(found[1], -1) {
		text, known := texts[caller]
		switch {
		case known && caller != d.name && !mention.MatchString(text):
			flaws = append(flaws, "caller "+caller+" does not mention it")
		case !known && strings.ContainsAny(caller, "_/"):
			flaws = append(flaws, "caller "+caller+" does not exist")
		}
	}
	return flaws
}

// goPackages gives the text of each package, by its path from the root.
func goPackages(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, root := range []string{"../cmd", "../pkg", "../internal"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			texts[strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../")] += string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return texts
}

func TestHeadsAreFound(t *testing.T) {
	const good = "f does. Locks: none. Callers: g, pkg/a; psql. SQLSTATE: PS002 invalid."
	raise := "CREATE FUNCTION penstock.f() RETURNS void AS $$ ERRCODE = 'PS002' $$"
	for _, c := range []struct {
		name, head string
		want       []string
	}{
		{"all there", good, nil},
		{"no head", "", []string{
			"no comment directly above it begins with its name", `its head has no line "Callers:"`,
			`it may write, and its head has no line "Locks:"`, "it raises PS002, which its head does not name",
		}},
		{"another name", "g" + good[1:], []string{"no comment directly above it begins with its name"}},
	} {
		if got := headFlaws(definition{kind: "FUNCTION", name: "f", head: c.head, text: raise}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	want := []string{"caller g does not mention it", "caller pkg/a does not exist"}
	if got := callerFlaws(definition{name: "f", head: good}, map[string]string{"g": "ff()"}); !slices.Equal(got, want) {
		t.Errorf("callers: %q, want %q", got, want)
	}
	if got := headOf("a;\n-- b\n\n-- c\n-- d\n"); got != "c d" {
		t.Errorf("head %q", got)
	}
}

// Users of the CLI and of the API read hints as well, and most of them cannot send SQL: a hint names the object and the
// verb in words. One that has no other way says that it is for SQL.
func TestHintsAreForThoseWithoutSQL(t *testing.T) {
	hint := regexp.MustCompile(`HINT = [^;]*;`)
	for _, d := range definitions(t) {
		for _, text := range hint.FindAllString(d.text, -1) {
			if sqlPattern.MatchString(text) && !strings.Contains(text, "in SQL") {
				t.Errorf("%s: %s: %s", d.file, d.name, text)
			}
		}
	}
}
