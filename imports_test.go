// Package penstock_test holds the rules about the repository as a whole: who may import whom, what a reader meets at one time, and which words are shared.
package penstock_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/penstock/penstock"

// allowedImports says which packages of this module a package imports, and no more. Those of a program are what any of them may import; a name ending in /...
// covers the packages below it.
// Imports point downwards: programs, duties, the queue, the database. Duties do not import one another:
// where one needs another it declares a small interface and the program supplies it.
var allowedImports = map[string][]string{
	// What knows nothing of the rest.
	"migrations":           {},
	"deploy/sbom":          {},
	"internal/postgres":    {},
	"internal/devpostgres": {},
	"internal/durable":     {},
	"internal/duty":        {},
	"internal/duration":    {},
	"internal/oneline":     {},
	"internal/stream":      {},
	"internal/tokenbucket": {},
	"internal/version":     {},

	// What a program that embeds the queue opens. It is the root of the module.
	"penstock": {"internal/postgres"},

	// What a program is told, and what it tells.
	"internal/config":    {"penstock", "internal/postgres"},
	"internal/telemetry": {"internal/httpserver"},

	"internal/telemetry/telemetrytest": {"internal/telemetry"},

	// The queue, the only writer of entry, ready, lock and failure.
	"pkg/invalidation":              {"internal/postgres", "internal/duration", "internal/duty", "internal/tokenbucket"},
	"pkg/invalidation/penstocktest": {"pkg/invalidation", "internal/postgres"},

	// The protocols of inference servers: HTTP, and nothing of Penstock. Its test servers know no more.
	"pkg/worker":            {"internal/duration"},
	"pkg/worker/workertest": {},

	// The statements about slots, the only writer of slot and slot_demand.
	"pkg/slot": {"internal/postgres", "pkg/invalidation"},

	// Use of workers on its way to the database.
	"pkg/usage": {"internal/duty", "internal/postgres", "pkg/invalidation"},

	// The duties.
	"pkg/governor":  {},
	"pkg/tasknode":  {"internal/duty", "internal/postgres", "pkg/fairness", "pkg/invalidation"},
	"pkg/fairness":  {"internal/duty", "internal/postgres", "pkg/invalidation"},
	"pkg/inference": {"internal/durable", "internal/duty", "internal/postgres", "pkg/invalidation", "pkg/slot", "pkg/usage", "pkg/worker"},
	"pkg/gateway": {
		"internal/durable", "internal/duty", "internal/httpserver", "internal/postgres", "internal/stream", "internal/tokenbucket", "pkg/invalidation",
		"pkg/slot", "pkg/usage", "pkg/worker",
	},
	"pkg/cron": {"internal/duty", "internal/postgres"},

	"pkg/gateway/openaibatch": {"internal/duty", "internal/postgres", "internal/stream", "pkg/gateway", "pkg/invalidation", "pkg/worker"},
	"pkg/gateway/prediction":  {"internal/duty", "internal/postgres", "internal/stream", "pkg/gateway", "pkg/invalidation", "pkg/worker"},

	"pkg/recovery":    {"internal/duty", "internal/postgres", "pkg/invalidation"},
	"pkg/maintenance": {"internal/duty", "internal/postgres", "pkg/invalidation"},
	"pkg/election":    {"internal/duty", "internal/postgres"},
	"pkg/webhook":     {"internal/duration", "internal/oneline", "internal/postgres", "pkg/invalidation"},
	"pkg/changelog":   {"internal/postgres", "pkg/invalidation"},
	"pkg/batch":       {"internal/duty", "internal/postgres", "pkg/invalidation"},
	"pkg/scale": {
		"internal/duration", "internal/duty", "internal/oneline", "internal/postgres", "internal/tokenbucket",
		"pkg/cron", // the schedules of floors
	},

	// Pictures and numbers of the dashboard: typed values in, markup out.
	"web/picture": {"web/format"},
	"web/format":  {},

	// Traces against the pure part of the autoscaler.
	"pkg/scale/simulate": {"pkg/scale"},

	// What starts and stops instances.
	"pkg/scale/backend": {"pkg/scale", "internal/durable", "internal/duration", "internal/duty"},

	// Numbers for KEDA, from rows. What is generated knows nothing.
	"pkg/scale/keda":                {"internal/duty", "internal/postgres", "pkg/scale/keda/externalscaler"},
	"pkg/scale/keda/externalscaler": {},

	// HTTP does what the CLI does, by the same functions.
	"pkg/api": {
		"internal/duty", "internal/httpserver", "internal/postgres", "internal/stream", "internal/tokenbucket", "migrations", "pkg/doctor",
		"pkg/invalidation", "pkg/operator",
		"pkg/scale", "pkg/scale/simulate",
	},

	// The dashboard reads and changes what the API does, by the same functions.
	// The page of the autoscaler plays a policy by the code that decides.
	"web": {
		"internal/postgres", "internal/stream", "pkg/doctor", "pkg/invalidation", "pkg/operator", "pkg/scale", "pkg/scale/simulate", "web/format",
		"web/picture",
	},

	// What operators see and do, and what is wrong; for the CLI, on the database itself.
	"pkg/operator": {"internal/oneline", "internal/postgres", "pkg/invalidation"},
	"pkg/doctor":   {"internal/postgres", "migrations"},

	// The client speaks HTTP: whoever imports it links no database driver of ours.
	"pkg/client": {},

	// The programs wire it all together.
	"cmd/leader":   program,
	"cmd/tasknode": program,
	"cmd/gateway":  program,
	"cmd/penstock": program,

	// A program as its users write it: it has nothing of internal/.
	"examples/greeting": {"penstock", "pkg/invalidation", "pkg/tasknode"},

	// The HTTP servers of the programs.
	"internal/httpserver": {},

	// For development and tests.
	"internal/pgtest":           {"migrations", "internal/devpostgres", "internal/pgtest/container"},
	"internal/pgtest/container": {"internal/devpostgres"},
	"internal/machine":          {},
}

var (
	program = []string{
		"penstock", "pkg/...", "web", "migrations", "internal/postgres", "internal/devpostgres", "internal/config", "internal/duty", "internal/telemetry",
		"internal/httpserver", "internal/oneline", "internal/version",
	}

	// allowedInTests is what the tests of any package may import besides.
	allowedInTests = []string{
		"migrations", "internal/postgres", "internal/devpostgres", "internal/pgtest", "internal/machine", "internal/telemetry/telemetrytest",
		"pkg/invalidation", "pkg/worker/workertest",
	}
)

// The table of imports in the documents, made from allowedImports.
const (
	architecturePage = "docs/architecture.md"
	importsBegin     = "<!-- imports -->\n"
	importsEnd       = "<!-- end of imports -->\n"
)

// listed is what `go list -json` says about a package, as far as it is needed here.
type listed struct {
	ImportPath   string
	GoFiles      []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

func TestImportsPointDownwards(t *testing.T) {
	architecture, err := os.ReadFile(architecturePage)
	if err != nil {
		t.Fatal(err)
	}
	absent := maps.Clone(allowedImports)
	for _, pkg := range goList(t) {
		name := relative(pkg.ImportPath)
		if len(pkg.GoFiles) == 0 {
			continue // tests alone, as in this directory
		}
		delete(absent, name)
		allowed, known := allowedImports[name]
		if !known {
			t.Errorf("%s is not in the table of imports: add a row to imports_test.go and to docs/architecture.md", name)
			continue
		}
		if !bytes.Contains(architecture, []byte("`"+name+"`")) {
			t.Errorf("docs/architecture.md says nothing about `%s`: add a row and a paragraph", name)
		}
		imports := ours(pkg.Imports)
		for _, imported := range imports {
			if !permitted(allowed, imported) {
				t.Errorf("%s imports %s; the table allows it only %v", name, imported, allowed)
			}
		}
		for _, row := range allowed {
			if !strings.HasPrefix(name, "cmd/") && !slices.Contains(imports, row) {
				t.Errorf("%s does not import %s: take it from its row of the table", name, row)
			}
		}
		inTests := slices.Concat(allowed, allowedInTests, []string{name})
		for _, imported := range ours(slices.Concat(pkg.TestImports, pkg.XTestImports)) {
			if !permitted(inTests, imported) {
				t.Errorf("the tests of %s import %s; the table allows them only %v", name, imported, inTests)
			}
		}
	}
	for name := range absent {
		t.Errorf("the table of imports has a row for %s, which does not exist", name)
	}
}

// The Docker client and the test helpers are for tests; nobody who installs a program should carry them.
func TestProgramsDoNotLinkTestingCode(t *testing.T) {
	forbidden := []string{
		module + "/internal/pgtest",
		module + "/internal/pgtest/container",
		module + "/internal/machine",
		module + "/internal/telemetry/telemetrytest",
		"github.com/testcontainers/testcontainers-go",
		"github.com/docker/docker",
		"github.com/moby/moby",
		"testing",
	}
	for _, pkg := range goList(t) {
		if !strings.HasPrefix(relative(pkg.ImportPath), "cmd/") {
			continue
		}
		for _, dep := range pkg.Deps {
			for _, bad := range forbidden {
				if dep == bad || strings.HasPrefix(dep, bad+"/") {
					t.Errorf("%s links %s, which is for tests only", pkg.ImportPath, dep)
				}
			}
		}
	}
}

// importGroups matches the import of a package of this module, and further down in the same list, behind an empty line,
// of another one.
var importGroups = regexp.MustCompile(`(?s)^[^)]*"github\.com/penstock/penstock[^)]*\n\n[^)]*"github\.com/penstock/penstock`)

func TestImportsOfThisModuleAreOneGroup(t *testing.T) {
	for path, text := range productionGo(t) {
		if _, list, found := bytes.Cut(text, []byte("\nimport (\n")); found && importGroups.Match(list) {
			t.Errorf("%s imports packages of this module in two groups", path)
		}
	}
}

func TestTheTableOfImportsOfTheDocumentsIsThatOfTheTest(t *testing.T) {
	text, err := os.ReadFile(architecturePage)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), importsBegin)
	_, after, ends := strings.Cut(rest, importsEnd)
	if !begins || !ends {
		t.Fatalf("%s lacks %q or %q", architecturePage, importsBegin, importsEnd)
	}
	want := before + importsBegin + "\n" + importsTable(allowedImports) + "\n" + importsEnd + after
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the table of imports_test.go: go test . -run TableOfImports -update", architecturePage)
	}
	if err := os.WriteFile(architecturePage, []byte(want), 0o644); err != nil { //nolint:gosec // a page for everyone
		t.Fatal(err)
	}
}

func TestATableOfImportsJoinsPackagesWithOneList(t *testing.T) {
	got := importsTable(map[string][]string{"b": {"y", "x"}, "a": {"x", "y"}, "c": {}, "d": {"pkg/..."}, "e": {"z", "z"}})
	want := "| package | may import (of this module) |\n|---|---|\n| `a`, `b` | `x`, `y` |\n| `c` | nothing |\n" +
		"| `d` | `pkg/...` |\n| `e` | `z` |\n"
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// importsTable writes a table of imports for readers: packages that may import the same are one row.
func importsTable(allowed map[string][]string) string {
	packages := map[string][]string{} // by the cell of their imports
	for name, list := range allowed {
		list = slices.Compact(slices.Sorted(slices.Values(list)))
		cell := "nothing"
		if len(list) > 0 {
			cell = quoted(list)
		}
		packages[cell] = append(packages[cell], name)
	}
	var rows []string
	for cell, names := range packages {
		slices.Sort(names)
		rows = append(rows, "| "+quoted(names)+" | "+cell+" |\n")
	}
	slices.Sort(rows)
	return "| package | may import (of this module) |\n|---|---|\n" + strings.Join(rows, "")
}

func quoted(names []string) string { return "`" + strings.Join(names, "`, `") + "`" }

func TestTableOfImportsRefusesWhatItShould(t *testing.T) {
	for _, c := range []struct {
		from, to string
		want     bool
	}{
		{"pkg/invalidation", "internal/postgres", true},
		{"pkg/invalidation", "migrations", false},
		{"pkg/cron", "internal/duty", true},
		{"pkg/cron", "pkg/invalidation", false},
		{"pkg/cron", "pkg/recovery", false},
		{"pkg/worker", "pkg/invalidation", false},
		{"pkg/recovery", "internal/pgtest", false},
		{"internal/postgres", "pkg/invalidation", false},
		{"cmd/leader", "pkg/cron", true},
		{"cmd/leader", "internal/pgtest", false},
		{"cmd/leader", "cmd/tasknode", false},
	} {
		if got := permitted(allowedImports[c.from], c.to); got != c.want {
			t.Errorf("may %s import %s: got %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

func permitted(allowed []string, name string) bool {
	return slices.ContainsFunc(allowed, func(row string) bool {
		if below, wild := strings.CutSuffix(row, "..."); wild {
			return strings.HasPrefix(name, below)
		}
		return row == name
	})
}

// ours keeps the imports of this module, named relative to it.
func ours(imports []string) []string {
	var names []string
	for _, path := range imports {
		if path == module || strings.HasPrefix(path, module+"/") {
			names = append(names, relative(path))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// relative is an import path without the module's, whose root is penstock.
func relative(path string) string {
	if path == module {
		return "penstock"
	}
	return strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
}

// goList asks the go command instead of parsing files, so that build tags and test files count as they do in a build.
func goList(t *testing.T) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,GoFiles,Imports,TestImports,XTestImports,Deps", "./...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var packages []listed
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var pkg listed
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatalf("read go list: %v", err)
		}
		packages = append(packages, pkg)
	}
}
