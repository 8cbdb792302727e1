package penstock_test

import (
	"os"
	"os/exec"
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

// Between them make race and make plain run each test: the packages are divided, and plain skips the tests that race runs.
func TestRaceAndPlainHaveAllPackages(t *testing.T) {
	var all []string
	for _, path := range strings.Fields(output(t, "go", "list", "./...")) {
		if folder := strings.TrimPrefix(strings.TrimPrefix(path, module), "/"); folder != "e2e" {
			all = append(all, "./"+folder)
		}
	}
	whole, rest := divided(t, "whole", all...), divided(t, "rest", all...)
	both := slices.Concat(whole, rest)
	slices.Sort(both)
	if !slices.Equal(both, slices.Sorted(slices.Values(all))) {
		t.Errorf("divided are %v, want %v", both, all)
	}
	for _, folder := range []string{"./pkg/gateway", "./pkg/inference", "./pkg/tasknode"} {
		if !slices.Contains(whole, folder) {
			t.Errorf("%s is not raced whole", folder)
		}
	}
	raced := strings.Split(strings.Join(divided(t, "tests", rest...), ""), "|")
	for _, name := range []string{"TestClaimIsExclusive", "TestNothingIsLostOrOvertakenInACrowd", "TestPushesThatComeMeanwhileGoTogether"} {
		if !slices.Contains(raced, name) {
			t.Errorf("%s is not raced", name)
		}
	}
	with := divided(t, "with", rest...)
	for _, folder := range rest {
		if !slices.Contains(with, folder) && slices.ContainsFunc(testsOf(t, folder), func(name string) bool { return slices.Contains(raced, name) }) {
			t.Errorf("plain leaves out a test of %s that race does not run", folder)
		}
	}
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, recipe := range []string{`-run "^($$tests)$$" $$with`, `-skip "^($(TIMED)|$(SERIAL)|$$tests)$$" $$rest`, `-skip '^($(TIMED)|$(SERIAL))$$' $$whole`} {
		if !strings.Contains(string(makefile), recipe) {
			t.Errorf("the Makefile does not run %s", recipe)
		}
	}
}

// A test that starts goroutines in a function of another file, by a method or a type, is found.
func TestConcurrentTestsAreFoundInTheSource(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"a.go": "package a\n\nfunc A() {}\n",
		"b.go": "package a\n\nvar events = make(chan int)\n",
		"a_test.go": `package a

import "testing"

func TestByAMethod(t *testing.T)   { var c crew; c.work() }
func TestByAFunction(t *testing.T) { several() }
func TestByAType(t *testing.T)     { var c guarded; _ = c }
func TestAlone(t *testing.T)       { work := 1; _ = work }
`,
		"b_test.go": "package a\n\nimport \"testing\"\n\nfunc TestOfAConcurrentFile(t *testing.T) {}\n",
		"c_test.go": `package a

import "sync"

type crew struct{}

func (crew) work() { several() }

func several() { go A() }

type guarded struct{ mu sync.Mutex }
`,
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const want = "TestByAFunction|TestByAMethod|TestByAType|TestOfAConcurrentFile"
	if got := strings.Join(divided(t, "tests", folder), ""); got != want {
		t.Errorf("found %s, want %s", got, want)
	}
}

func divided(t *testing.T, what string, folders ...string) []string {
	t.Helper()
	return strings.Fields(output(t, "go", append([]string{"run", ".ci/concurrent.go", what}, folders...)...))
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, args...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return string(out)
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
