package pgtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock/penstock/migrations"
)

// The code that applies the migrations writes a record of the schema into the template: the migrations alone do not
// identify it.
func TestTemplatesOfOtherCodeHaveAnotherKey(t *testing.T) {
	digest, err := migrations.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if key, whole, err := templateKey(); err != nil || !whole || key == digest {
		t.Errorf("the key is %q, whole: %v, %v", key, whole, err)
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		key, err := codeDigest(dir)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	first := write("catalog.go", "package a")
	if tested := write("catalog_test.go", "package a"); tested != first {
		t.Error("a test changes the key")
	}
	if changed := write("catalog.go", "package a // changed"); changed == first || first == "" {
		t.Errorf("a change of the code leaves the key %q", first)
	}
}
