package workertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// BuildExample returns the program of examples/worker for a test of a package two folders below the
// root. The one that `make build` has left in bin is copied first: the build links it only where it
// is not up to date.
func BuildExample(t *testing.T) string {
	t.Helper()
	const root, source = "../..", "../../examples/worker"
	files, err := filepath.Glob(filepath.Join(source, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files { // so that no result is cached across a change of it
		if _, err := os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(t.TempDir(), "worker")
	if text, err := os.ReadFile(filepath.Join(root, "bin", "worker")); err == nil {
		if err := os.WriteFile(program, text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = source
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("examples/worker cannot be built: %v\n%s", err, output)
	}
	return program
}
