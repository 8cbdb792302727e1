package mutants_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/mutants"
)

// The product changes, and patches go stale: each must still apply, and what it makes must compile.
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
			overlay, err := m.Apply(t.Context(), root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			var packages []string
			for _, name := range m.Files() {
				if p := "./" + filepath.Dir(name); filepath.Ext(name) == ".go" &&
					!slices.Contains(packages, p) {
					packages = append(packages, p)
				}
			}
			if len(packages) == 0 {
				return // a function of the schema, which the database compiles
			}
			if err := m.Build(t.Context(), root, overlay, "", packages...); err != nil {
				t.Error(err)
			}
		})
	}
}
