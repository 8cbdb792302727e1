package pgtest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/penstock/penstock/migrations"
)

// templateKey identifies the template: by the migrations, and by the Go code that applies them, records the schema
// and makes the template of it. Where that code is not at hand (-trimpath) the key is not whole, and a template under
// it may be of other code.
func templateKey() (key string, whole bool, err error) {
	digest, err := migrations.Digest()
	if err != nil {
		return "", false, fmt.Errorf("identify migrations: %w", err)
	}
	_, file, _, _ := runtime.Caller(0)
	here := filepath.Dir(file)
	code, err := codeDigest(here, filepath.Join(here, "..", "..", "migrations"))
	if err != nil || code == "" {
		return digest, false, nil //nolint:nilerr // the code is not at hand
	}
	sum := sha256.Sum256([]byte(digest + code))
	return hex.EncodeToString(sum[:]), true, nil
}

// codeDigest identifies the Go code of some directories without their tests. It is empty where one of them has none.
func codeDigest(dirs ...string) (string, error) {
	sum := sha256.New()
	for _, dir := range dirs {
		found := false
		list, err := os.ReadDir(dir)
		if err != nil {
			return "", err
		}
		for _, e := range list {
			if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
				continue
			}
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return "", err
			}
			found = true
			fmt.Fprintf(sum, "%s %x\n", e.Name(), sha256.Sum256(text))
		}
		if !found {
			return "", nil
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
