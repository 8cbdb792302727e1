package penstock_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A test that is renamed would otherwise leave both its own target and the list of what other targets skip, in silence.
func TestTestsThatTheMakefileNamesExist(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range []string{"TIMED", "SERIAL", "LONG"} {
		names := strings.Split(makeVariable(t, string(makefile), list), "|")
		declared := map[string]bool{}
		for _, folder := range strings.Fields(makeVariable(t, string(makefile), list+"_IN")) {
			before := len(declared)
			for _, name := range testsOf(t, folder) {
				if slices.Contains(names, name) {
					declared[name] = true
				}
			}
			if len(declared) == before {
				t.Errorf("%s_IN names %s, which has none of the tests of %s", list, folder, list)
			}
		}
		for _, name := range names {
			if !declared[name] {
				t.Errorf("%s names %s, which no package of %s_IN has: rename it there too", list, name, list)
			}
		}
	}
}

var testFunction = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9]+)\(t \*testing\.T\)`)

func testsOf(t *testing.T, folder string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range testFunction.FindAllSubmatch(text, -1) {
			names = append(names, string(match[1]))
		}
	}
	return names
}

func makeVariable(t *testing.T, text, name string) string {
	t.Helper()
	match := regexp.MustCompile(`(?m)^` + name + `\s*:= (.+)$`).FindStringSubmatch(text)
	if match == nil {
		t.Fatalf("the Makefile does not set %s", name)
	}
	return match[1]
}
