package penstock_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A lock of a session outlives its transaction: it leaks into a pool, and behind PgBouncer into another client.
var sessionLock = regexp.MustCompile(`pg_(try_)?advisory_(lock|unlock)`)

func TestNoProgramTakesAnAdvisoryLockForASession(t *testing.T) {
	looked := 0
	for _, folder := range []string{"migrations", "pkg", "cmd", "internal/postgres"} {
		walkFiles(t, folder, func(path string, text []byte) {
			if ext := filepath.Ext(path); strings.HasSuffix(path, "_test.go") || (ext != ".go" && ext != ".sql") {
				return
			}
			looked++
			if match := sessionLock.Find(text); match != nil {
				t.Errorf("%s calls %s: take pg_advisory_xact_lock, which ends with its transaction", path, match)
			}
		})
	}
	if looked == 0 {
		t.Fatal("found no statements")
	}
	if !sessionLock.MatchString("SELECT pg_try_advisory_lock(1)") || sessionLock.MatchString("SELECT pg_advisory_xact_lock_shared(1)") {
		t.Error("the expression does not tell locks of a session from those of a transaction")
	}
}

// The pages on reliability say which test keeps which failure out. A test that is renamed must be renamed there too.
func TestReliabilityNamesTestsThatExist(t *testing.T) {
	pages, err := filepath.Glob("docs/reliability/*.md")
	if err != nil {
		t.Fatal(err)
	}
	pageOf := map[string]string{} // by the name of a test
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`")
	for _, page := range append(pages, "docs/reliability.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range named.FindAllSubmatch(text, -1) {
			pageOf[string(match[1])] = page
		}
	}
	if len(pageOf) == 0 {
		t.Fatal("the pages on reliability name no test")
	}
	declared := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9]+)\(`)
	walkFiles(t, ".", func(path string, text []byte) {
		if strings.HasSuffix(path, "_test.go") {
			for _, match := range function.FindAllSubmatch(text, -1) {
				declared[string(match[1])] = true
			}
		}
	})
	for name, page := range pageOf {
		if !declared[name] {
			t.Errorf("%s names %s, which does not exist", page, name)
		}
	}
}

// A check that has nothing to check with says so, and does not pass where it is to be relied upon.
func TestModelsThatAreNotCheckedAreAnErrorOfCI(t *testing.T) {
	tools := t.TempDir() // all that the script needs until it looks for spin
	for _, name := range []string{"bash", "dirname"} {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(tools, name)); err != nil {
			t.Fatal(err)
		}
	}
	for ci, fails := range map[string]bool{"": false, "false": false, "true": true} {
		check := exec.CommandContext(t.Context(), filepath.Join(tools, "bash"), "models/check", "-short")
		check.Env = []string{"PATH=" + tools, "CI=" + ci}
		out, err := check.CombinedOutput()
		if (err != nil) != fails || !strings.Contains(string(out), "NOT CHECKED, spin is missing") {
			t.Errorf("CI=%q: %v, %s", ci, err, out)
		}
	}
}

func walkFiles(t *testing.T, folder string, visit func(path string, text []byte)) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if path != folder && (strings.HasPrefix(name, ".") || name == "node_modules" || name == "tmp" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if ext := filepath.Ext(name); ext != ".go" && ext != ".sql" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			visit(path, text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
