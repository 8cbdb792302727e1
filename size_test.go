package penstock_test

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
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
	// wideLinesMax is how many lines of production Go were wider when the rule came. It only ever goes down:
	// whoever folds wide lines lowers it, and at zero it goes.
	wideLinesMax = 232
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

func TestLinesOfProductionCodeFitTheScreen(t *testing.T) {
	wide := 0
	byFolder := map[string]int{}
	for path, text := range productionGo(t) {
		if n := wideLines(text); n > 0 && !isGenerated(text) {
			wide += n
			byFolder[filepath.Dir(path)] += n
		}
	}
	folders := slices.SortedFunc(maps.Keys(byFolder), func(a, b string) int { return byFolder[b] - byFolder[a] })
	for _, folder := range folders {
		t.Logf("%4d lines of %s are wider than %d columns", byFolder[folder], folder, lineColumnsMax)
	}
	if wide > wideLinesMax {
		t.Errorf("%d lines of production Go are wider than %d columns, more than the %d that were when the rule came: fold the new ones",
			wide, lineColumnsMax, wideLinesMax)
	}
}

func TestWideLinesAreCounted(t *testing.T) {
	fits, tabbed := strings.Repeat("é", lineColumnsMax), "\t"+strings.Repeat("x", lineColumnsMax-tabColumns)
	text := strings.Join([]string{fits, fits + "x", tabbed, tabbed + "x", ""}, "\n")
	if got := wideLines([]byte(text)); got != 2 {
		t.Errorf("got %d wide lines of two, by runes and by tabs", got)
	}
}

func wideLines(text []byte) int {
	wide := 0
	for line := range bytes.Lines(text) {
		line = bytes.TrimRight(line, "\n")
		if utf8.RuneCount(line)+bytes.Count(line, []byte("\t"))*(tabColumns-1) > lineColumnsMax {
			wide++
		}
	}
	return wide
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
