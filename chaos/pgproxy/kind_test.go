package pgproxy

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The kinds are told by texts of the product's statements. Where a statement was rewritten, its
// sign must be rewritten too: else faults would no longer meet it, in silence.
func TestEverySignIsInAStatementOfTheProduct(t *testing.T) {
	var texts []string
	for _, folder := range []string{"../../pkg", "../../migrations/functions"} {
		err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") ||
				filepath.Ext(path) != ".go" {
				return err
			}
			text, err := os.ReadFile(path)
			texts = append(texts, string(text))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, sign := range signs {
		found := false
		for _, text := range texts {
			found = found || sign.text.MatchString(text)
		}
		if !found {
			t.Errorf("no statement under pkg has the sign of kind %s: %s", sign.kind, sign.text)
		}
	}
}

func TestRenderedClaimsAreClaims(t *testing.T) {
	files, err := filepath.Glob("../../pkg/invalidation/testdata/*.sql")
	if err != nil || len(files) == 0 {
		t.Fatalf("no rendered statements: %v", err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if k := kindOf(string(text)); strings.Contains(name, "claim") && k != Claim {
			t.Errorf("%s is of kind %s", name, k)
		}
	}
}
