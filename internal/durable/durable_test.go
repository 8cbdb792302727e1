package durable_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock/penstock/internal/durable"
)

func TestAFileIsReplacedWholeAndNothingIsLeftBeside(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for _, text := range []string{"the first text", "new"} {
		if err := durable.WriteFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("read %q, %v: want %q", got, err, text)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v: want 0600", info.Mode(), err)
	}
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	if durable.WriteFile(filepath.Join(dir, "directory"), nil) == nil {
		t.Error("a file replaced a directory")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("there are %v, %v", left, err)
	}
}
