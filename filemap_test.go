package penstock_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// mapped matches a line of a file map in a package comment: an indented line that begins with the name of a file.
var mapped = regexp.MustCompile(`(?m)^//\t(\S+\.go)\b`)

// unmapped are packages whose comments give examples of files alone: a file has the name of the noun that it is about.
var unmapped = map[string]bool{"pkg/api": true, "pkg/operator": true}

// A package whose comment has a map of its files names each of them there.
func TestFileMapsNameEachFileOfTheirPackage(t *testing.T) {
	maps := 0
	for dir, files := range packages(t) {
		text, err := os.ReadFile(filepath.Join(dir, "doc.go"))
		if err != nil || unmapped[dir] || !mapped.Match(text) {
			continue
		}
		maps++
		for _, file := range files {
			if file != "doc.go" && !regexp.MustCompile(`\b`+regexp.QuoteMeta(file)+`\b`).Match(text) {
				t.Errorf("%s/doc.go: the map of files leaves out %s", dir, file)
			}
		}
		for _, name := range regexp.MustCompile(`\b[a-z0-9_]+\.go\b`).FindAllString(string(text), -1) {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				t.Errorf("%s/doc.go names %s, which does not exist", dir, name)
			}
		}
	}
	if maps < 8 {
		t.Errorf("%d packages have a map of files, want at least 8", maps)
	}
}

// packages returns the files without tests of each package of the product.
func packages(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for _, pattern := range []string{"pkg/*/*.go", "pkg/*/*/*.go", "internal/*/*.go", "web/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				found[filepath.Dir(file)] = append(found[filepath.Dir(file)], filepath.Base(file))
			}
		}
	}
	return found
}
