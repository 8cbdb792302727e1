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

// Between them make race and make plain run each test: what one of them skips the other one runs.
func TestRaceAndPlainHaveAllTests(t *testing.T) {
	var all []string
	for _, path := range strings.Fields(output(t, ".", "go", "list", "./...")) {
		if folder := strings.TrimPrefix(strings.TrimPrefix(path, module), "/"); folder != "e2e" {
			all = append(all, "./"+folder)
		}
	}
	d := divide(t, ".", all...)
	for _, folder := range all {
		raced, plain := slices.Contains(d["raced"], folder), slices.Contains(d["plain"], folder)
		for _, name := range testsOf(t, folder) {
			if (!raced || slices.Contains(d["alone"], name)) && (!plain || slices.Contains(d["beside"], name)) {
				t.Errorf("neither make race nor make plain runs %s of %s", name, folder)
			}
		}
	}
	for _, folder := range []string{"./pkg/gateway", "./pkg/inference", "./pkg/tasknode"} {
		if !slices.Contains(d["raced"], folder) || slices.Contains(d["plain"], folder) {
			t.Errorf("%s is not raced whole", folder)
		}
	}
	for _, name := range []string{"TestClaimIsExclusive", "TestNothingIsLostOrOvertakenInACrowd", "TestPushesThatComeMeanwhileGoTogether"} {
		if slices.Contains(d["alone"], name) || !slices.Contains(d["beside"], name) {
			t.Errorf("%s is not raced alone", name)
		}
	}
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, recipe := range []string{`-skip "^($(TIMED)|$(SERIAL)|$$alone)$$" $$raced`, `-skip "^($(TIMED)|$(SERIAL)|$$beside)$$" $$plain`} {
		if !strings.Contains(string(makefile), recipe) {
			t.Errorf("the Makefile does not run %s", recipe)
		}
	}
}

// A test that starts goroutines in a function of another file, by a method or a type, is found.
func TestConcurrentTestsAreFoundInTheSource(t *testing.T) {
	root := t.TempDir()
	folder := filepath.Join(root, "web") // a name of a package whose tests are divided
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
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
	d := divide(t, root, "web")
	if want := []string{"TestByAFunction", "TestByAMethod", "TestByAType", "TestOfAConcurrentFile"}; !slices.Equal(d["beside"], want) {
		t.Errorf("found %s, want %s", d["beside"], want)
	}
	if want := []string{"TestAlone"}; !slices.Equal(d["alone"], want) {
		t.Errorf("the others are %s, want %s", d["alone"], want)
	}
}

// divide returns the lists that concurrent.go prints, by their names.
func divide(t *testing.T, root string, folders ...string) map[string][]string {
	t.Helper()
	program, err := filepath.Abs(".ci/concurrent.go")
	if err != nil {
		t.Fatal(err)
	}
	lists := map[string][]string{}
	for line := range strings.Lines(output(t, root, "go", append([]string{"run", program}, folders...)...)) {
		name, list, _ := strings.Cut(strings.TrimSpace(line), "=")
		lists[name] = strings.FieldsFunc(list, func(r rune) bool { return r == '\'' || r == ' ' || r == '|' })
	}
	return lists
}

func output(t *testing.T, root, name string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, args...)
	command.Dir, command.Stderr = root, os.Stderr
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
