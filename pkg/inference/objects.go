package inference

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/penstock/penstock/internal/durable"
)

// ObjectStore keeps results that are too large for a row.
type ObjectStore interface {
	// Put stores data under key, and returns an address by which it can be found. Putting the same
	// key again replaces the object. The object is durable when Put returns.
	Put(ctx context.Context, key string, data []byte) (address string, err error)
}

// ObjectRef is stored in a result row in place of a result that is kept elsewhere: {"$object": {...}}.
type ObjectRef struct {
	URL    string `json:"url"`
	Size   int    `json:"size"`   // bytes
	SHA256 string `json:"sha256"` // hexadecimal
}

// storeLarge puts a result beyond limit bytes into the store, and returns what the row holds
// instead.
func storeLarge(ctx context.Context, store ObjectStore, limit int, key string,
	result json.RawMessage,
) (json.RawMessage, error) {
	if store == nil || len(result) <= limit {
		return result, nil
	}
	address, err := store.Put(ctx, key, result)
	if err != nil {
		return nil, fmt.Errorf("store result of %d bytes: %w", len(result), err)
	}
	sum := sha256.Sum256(result)
	return json.Marshal(map[string]ObjectRef{"$object": {
		URL: address, Size: len(result),
		SHA256: hex.EncodeToString(sum[:]),
	}})
}

// Directory is an ObjectStore on the local disk, or on one that all nodes mount.
type Directory string

// Put writes the object, readable by its owner alone.
func (d Directory) Put(_ context.Context, key string, data []byte) (string, error) {
	if !filepath.IsLocal(key) {
		return "", fmt.Errorf("put object: key %q leads out of the store", key)
	}
	path, err := filepath.Abs(filepath.Join(string(d), key))
	if err != nil {
		return "", fmt.Errorf("put object: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return "", fmt.Errorf("put object: %w", err)
	}
	if err := durable.WriteFile(path, data); err != nil {
		return "", fmt.Errorf("put object: %w", err)
	}
	return (&url.URL{Scheme: "file", Path: path}).String(), nil
}
