package penstock_test

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	// fileLinesMax keeps a file to one story that can be read in a sitting.
	fileLinesMax = 500
	// lineColumnsMax is what fits beside a diff on one screen; a tab counts as tabColumns.
	lineColumnsMax = 120
	tabColumns     = 4
)

// Reading every file has a second use: the go command caches the result of this package's tests,
// and forgets it when a file that they read has changed, which `go list` alone would not bring about.
func TestAFileTellsOneStory(t *testing.T) {
	files := productionGo(t)
	if len(files) == 0 {
		t.Fatal("found no production Go")
	}
	for path, text := range files {
		if lines := bytes.Count(text, []byte("\n")); lines > fileLinesMax && !isGenerated(text) {
			t.Errorf("%s has %d lines, more than %d: split it by subject", path, lines, fileLinesMax)
		}
	}
}

// isGenerated says whether a file is written by a program, as protoc-gen-go marks it.
func isGenerated(text []byte) bool { return bytes.Contains(text, []byte("\n// Code generated ")) }

// structTag is a line that ends with the tag of a field, which Go cannot continue on the next line. The longest ones
// are the help texts of options.
var structTag = regexp.MustCompile("`[a-z]+:\".*\"`$")

func TestLinesOfProductionCodeFitTheScreen(t *testing.T) {
	for path, text := range productionGo(t) {
		if isGenerated(text) {
			continue
		}
		for _, line := range wideLines(text, lineColumnsMax) {
			t.Errorf("%s:%d is wider than %d columns: fold it", path, line, lineColumnsMax)
		}
	}
}

func TestWideLinesAreFound(t *testing.T) {
	fits, tabbed := strings.Repeat("é", lineColumnsMax), "\t"+strings.Repeat("x", lineColumnsMax-tabColumns)
	tag := "\tField string `koanf:\"field\" help:\"" + fits + "\"`"
	text := strings.Join([]string{fits, fits + "x", tabbed, tabbed + "x", tag, ""}, "\n")
	if got, want := wideLines([]byte(text), lineColumnsMax), []int{2, 4}; !slices.Equal(got, want) {
		t.Errorf("lines %v are too wide, want %v: one by runes and one by its tab, but not the tag", got, want)
	}
}

// wideLines are the numbers of the lines that have more than so many columns and can be folded.
func wideLines(text []byte, most int) (numbers []int) {
	number := 0
	for line := range bytes.Lines(text) {
		number++
		line = bytes.TrimRight(line, "\n")
		columns := utf8.RuneCount(line) + bytes.Count(line, []byte("\t"))*(tabColumns-1)
		if columns > most && !structTag.Match(line) {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// sqlColumnsMax bounds the lines of SQL functions that are wide still, see wideSQL.
const sqlColumnsMax = 200

// wideSQL is how many lines of the files of functions were wider than lineColumnsMax when the rule came. A file that is
// not here has none. The numbers may only fall, down to the removal of the row: fold what you touch.
var wideSQL = map[string]int{
	"admission.sql":    6,
	"batch.sql":        7,
	"blocked_keys.sql": 1,
	"brake.sql":        1,
	"changelog.sql":    6,
	"cron.sql":         4,
	"explain.sql":      1,
	"gateway.sql":      6,
	"inference.sql":    5,
	"instances.sql":    2,
	"lock_keys.sql":    1,
	"ondemand.sql":     2,
	"operations.sql":   1,
	"push.sql":         1,
	"push_checks.sql":  12,
	"queues.sql":       9,
	"rights.sql":       10,
	"scale.sql":        9,
	"seed.sql":         1,
	"statements.sql":   3,
	"tokens_audit.sql": 1,
	"triggers.sql":     4,
	"unique.sql":       1,
	"views.sql":        3,
	"webhook.sql":      2,
}

func TestLinesOfSQLFunctionsGetNoWider(t *testing.T) {
	paths, err := filepath.Glob("migrations/functions/*.sql")
	if err != nil || len(paths) == 0 {
		t.Fatalf("found no functions: %v", err)
	}
	absent := maps.Clone(wideSQL)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(path)
		delete(absent, name)
		wide := wideLines(text, lineColumnsMax)
		switch {
		case len(wide) > wideSQL[name]:
			t.Errorf("%s has %d lines of more than %d columns, and may have %d: fold those that you wrote (%v)",
				path, len(wide), lineColumnsMax, wideSQL[name], wide)
		case len(wide) < wideSQL[name]:
			t.Errorf("%s has fewer wide lines: write %d in wideSQL, or remove its row at 0", path, len(wide))
		}
		for _, line := range wideLines(text, sqlColumnsMax) {
			t.Errorf("%s:%d is wider than %d columns: fold it", path, line, sqlColumnsMax)
		}
	}
	for name := range absent {
		t.Errorf("%s does not exist: remove its row from wideSQL", name)
	}
}

// productionGo reads every Go file of the repository, of all its modules, that is not a test.
func productionGo(t *testing.T) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if path != "." && (strings.HasPrefix(name, ".") || name == "node_modules" || name == "tmp") {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		files[path], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
