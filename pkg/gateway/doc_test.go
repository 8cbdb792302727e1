package gateway

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The package's documentation has a line for each file, and none for a file that is gone.
func TestDocumentationNamesEveryFile(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if rest, is := strings.CutPrefix(line, "//\t"); is {
			if word := strings.Fields(rest); len(word) > 0 && strings.HasSuffix(word[0], ".go") {
				named[word[0]] = true
			}
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || name == "doc.go" {
			continue
		}
		if !named[name] {
			t.Errorf("doc.go does not name %s", name)
		}
		delete(named, name)
	}
	for name := range named {
		t.Errorf("doc.go names %s, which is not there", name)
	}
}
