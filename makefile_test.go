package penstock_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A test that is renamed would otherwise leave both `make timed` and the list of what other targets skip, in silence.
func TestTimedTestsOfTheMakefileExist(t *testing.T) {
	text, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Split(makeVariable(t, string(text), "TIMED"), "|")
	folders := strings.Fields(makeVariable(t, string(text), "TIMED_IN"))
	declared := map[string]bool{}
	for _, folder := range folders {
		before := len(declared)
		files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				if strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)") {
					declared[name] = true
				}
			}
		}
		if len(declared) == before {
			t.Errorf("TIMED_IN names %s, which has none of the tests of TIMED", folder)
		}
	}
	for _, name := range names {
		if !declared[name] {
			t.Errorf("TIMED names %s, which no package of TIMED_IN has: rename it there too", name)
		}
	}
}

func makeVariable(t *testing.T, text, name string) string {
	t.Helper()
	match := regexp.MustCompile(`(?m)^` + name + `\s*:= (.+)$`).FindStringSubmatch(text)
	if match == nil {
		t.Fatalf("the Makefile does not set %s", name)
	}
	return match[1]
}
