package worker

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A header that HTTP does not allow is an error when the model is read, and not one of each call.
func TestHeadersThatHTTPDoesNotAllowAreRefused(t *testing.T) {
	t.Parallel()
	for _, headers := range []map[string]string{{"X A": "1"}, {"X-A": "1\n2"}, {"": "1"}} {
		h, err := ResolveHeaders(headers, SecretStore{})
		var of *HeaderError
		if !errors.As(err, &of) || of.Header == "" {
			t.Errorf("%v became %v, error %v", headers, h, err)
		}
	}
	h, err := ResolveHeaders(map[string]string{"x-a": "1, 2"}, SecretStore{})
	if err != nil || h.Get("X-A") != "1, 2" {
		t.Errorf("got %v, %v", h, err)
	}
}

// Settings of models come from the database: their references reach the store of secrets and nothing else.
func TestHeadersReachNoFileBeyondTheStore(t *testing.T) {
	t.Parallel()
	secrets, elsewhere := SecretStore{Dir: t.TempDir()}, filepath.Join(t.TempDir(), "key")
	within := filepath.Join(secrets.Dir, "key")
	for _, name := range []string{within, elsewhere} {
		if err := os.WriteFile(name, []byte("hush"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h, err := ResolveHeaders(map[string]string{"Authorization": "file:" + within}, secrets)
	if err != nil || h.Get("Authorization") != "hush" {
		t.Errorf("got %v, %v", h, err)
	}
	for _, reference := range []string{"file:" + elsewhere, "env:HOME", "Bearer ${env:HOME}"} {
		if h, err := ResolveHeaders(map[string]string{"Authorization": reference}, secrets); err == nil {
			t.Errorf("%s became %v", reference, h)
		}
	}
}
