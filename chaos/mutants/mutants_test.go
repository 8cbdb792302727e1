package mutants_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/mutants"
)

// The product changes, and patches go stale: each must still apply, and what it makes must compile. The types are checked here;
// make chaos-mutants links the programs.
func TestMutantsApplyAndCompile(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	all, err := mutants.All()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Errorf("%d mutants, want 20 at least", len(all))
	}
	sources := readSources(t, root, "./...")
	for _, m := range all {
		t.Run(m.Name, func(t *testing.T) {
			if m.Bug == "" || strings.HasPrefix(m.Bug, "diff") {
				t.Error("the first line of the patch does not say what the bug is")
			}
			for _, promise := range m.Breaks {
				if !slices.ContainsFunc(judge.Invariants, func(i judge.Invariant) bool { return i.Name == promise }) {
					t.Errorf("no judge has the promise %q", promise)
				}
			}
			if len(m.Breaks) == 0 {
				t.Error("the second line of the patch does not say which promises it breaks")
			}
			patched := t.TempDir()
			if _, err := m.Apply(t.Context(), root, patched); err != nil {
				t.Fatal(err)
			}
			var folders []string
			for _, name := range m.Files() { // a function of the schema is compiled by the database
				if folder := filepath.Dir(name); filepath.Ext(name) == ".go" && !slices.Contains(folders, folder) {
					folders = append(folders, folder)
				}
			}
			for _, folder := range folders {
				if err := sources.check(folder, patched); err != nil {
					t.Errorf("mutant %s does not compile: %v", m.Name, err)
				}
			}
		})
	}
}

func TestACheckOfTypesFindsWhatDoesNotCompile(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	sources := readSources(t, root, "./internal/oneline")
	const folder, name = "internal/oneline", "oneline.go"
	text, err := os.ReadFile(filepath.Join(root, folder, name))
	if err != nil {
		t.Fatal(err)
	}
	for added, compiles := range map[string]bool{
		"": true, "func f() int { return \"\" }": false, "func f() { unused := 1 }": false, "func f() {": false,
	} {
		patched := t.TempDir()
		if err := os.MkdirAll(filepath.Join(patched, folder), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(patched, folder, name), append(text, "\n"+added...), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := sources.check(folder, patched); (err == nil) != compiles {
			t.Errorf("with %q added the check says: %v", added, err)
		}
	}
}

// sources are the packages of the product by folder, and what the compiler exported of each of their dependencies.
type sources struct {
	packages map[string]listed
	importer types.Importer
	fset     *token.FileSet
}

type listed struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
}

func readSources(t *testing.T, root, packages string) *sources {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-e", "-export", "-deps", "-json=ImportPath,Dir,GoFiles,Export", packages)
	list.Dir, list.Stderr = root, os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	s := &sources{packages: map[string]listed{}, fset: token.NewFileSet()}
	exports := map[string]string{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if folder, err := filepath.Rel(root, p.Dir); err == nil && filepath.IsLocal(folder) {
			s.packages[folder] = p
		}
	}
	s.importer = importer.ForCompiler(s.fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("go list knows nothing of %s", path)
		}
		return os.Open(exports[path])
	})
	return s
}

// check type-checks the package in the folder, with those of its files that are in patched in place of its own.
func (s *sources) check(folder, patched string) error {
	p, known := s.packages[folder]
	if !known {
		return fmt.Errorf("there is no package in %s", folder)
	}
	var files []*ast.File
	for _, name := range p.GoFiles {
		path := filepath.Join(patched, folder, name)
		if _, err := os.Stat(path); err != nil {
			path = filepath.Join(p.Dir, name)
		}
		file, err := parser.ParseFile(s.fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, file)
	}
	_, err := (&types.Config{Importer: s.importer}).Check(p.ImportPath, s.fset, files, nil)
	return err
}
