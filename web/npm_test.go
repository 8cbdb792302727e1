package web

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"
)

// fromNPM returns the hash of a file in the tarball of a package.
func fromNPM(t *testing.T, name, version, path string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	address := fmt.Sprintf("https://registry.npmjs.org/%s/-/%[1]s-%s.tgz", name, version)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	w, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Body.Close()
	unzipped, err := gzip.NewReader(w.Body)
	if err != nil {
		t.Fatalf("%s: %d: %v", address, w.StatusCode, err)
	}
	for tarball := tar.NewReader(unzipped); ; {
		header, err := tarball.Next()
		if errors.Is(err, io.EOF) {
			t.Fatalf("%s has no %s", address, path)
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Name == "package/"+path {
			hash := sha256.New()
			if _, err := io.Copy(hash, tarball); err != nil { //nolint:gosec // a package that VENDOR.md names
				t.Fatal(err)
			}
			return fmt.Sprintf("%x", hash.Sum(nil))
		}
	}
}
