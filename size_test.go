package penstock_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	// fileLinesMax keeps a file to one story that can be read in a sitting.
	fileLinesMax = 500
	// productLinesMax is the budget for production Go; docs/adr/0011-size-budget.md says what to cut first and what would change it.
	productLinesMax = 42_000
)

// Reading every file has a second use: the go command caches the result of this package's tests,
// and forgets it when a file that they read has changed, which `go list` alone would not bring about.
func TestProductStaysWithinItsBudget(t *testing.T) {
	total := 0
	for path, inProduct := range goFiles(t) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		lines := bytes.Count(text, []byte("\n"))
		if lines > fileLinesMax {
			t.Errorf("%s has %d lines, more than %d: it tells more than one story", path, lines, fileLinesMax)
		}
		if inProduct {
			total += lines
		}
	}
	t.Logf("production Go: %d lines of %d", total, productLinesMax)
	if total == 0 || total > productLinesMax {
		t.Errorf("production Go has %d lines; expected some, and at most the budget of %d", total, productLinesMax)
	}
}

// goFiles finds every Go file of the repository and says whether it belongs to the product's own module.
func goFiles(t *testing.T) map[string]bool {
	t.Helper()
	files := map[string]bool{}
	var others []string // directories of other modules; a walk reaches a directory before what is in it
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			switch name := entry.Name(); {
			case path == ".":
				return nil
			case strings.HasPrefix(name, "."), name == "node_modules", name == "tmp":
				return fs.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				others = append(others, path+string(filepath.Separator))
			}
			return nil
		}
		if filepath.Ext(path) == ".go" {
			files[path] = !hasPrefixIn(path, others)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func hasPrefixIn(path string, prefixes []string) bool {
	for _, prefix := range prefixes {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}
