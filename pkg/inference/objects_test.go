package inference

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestDirectoryKeepsKeysInside(t *testing.T) {
	store := Directory(t.TempDir())
	for _, key := range []string{"../out", "/etc/passwd", "a/../../b", ""} {
		if _, err := store.Put(t.Context(), key, []byte("1")); err == nil {
			t.Errorf("key %q was accepted", key)
		}
	}
	for _, text := range []string{"1", "22"} { // the second replaces the first
		address, err := store.Put(t.Context(), "queue/1-2.json", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		kept, err := os.ReadFile(strings.TrimPrefix(address, "file://"))
		if err != nil || string(kept) != text {
			t.Errorf("kept %q (%v), want %q", kept, err, text)
		}
	}
}

// The wire of S3: a signed PUT of the whole object below the bucket.
func TestS3PutsBelowItsBucketAndPrefix(t *testing.T) {
	t.Setenv("TEST_S3_ACCESS", "access")
	t.Setenv("TEST_S3_SECRET", "secret")
	worker := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("ETag", `"0123456789abcdef0123456789abcdef"`)
	})
	store, err := NewS3(S3Config{
		Endpoint: worker.URL, Bucket: "results", Prefix: "penstock/", AccessKey: "env:TEST_S3_ACCESS", SecretKey: "env:TEST_S3_SECRET",
	})
	if err != nil {
		t.Fatal(err)
	}
	address, err := store.Put(t.Context(), "flux/1-2.json", []byte(`{"ok":true}`))
	if err != nil {
		t.Fatal(err)
	}
	if address != "s3://results/penstock/flux/1-2.json" {
		t.Errorf("address is %s", address)
	}
	seen := worker.Requests()
	if len(seen) != 1 || seen[0].Method != http.MethodPut || seen[0].Path != "/results/penstock/flux/1-2.json" ||
		!strings.Contains(seen[0].Body, `{"ok":true}`) || !strings.HasPrefix(seen[0].Header.Get("Authorization"), "AWS4-HMAC-SHA256") {
		t.Errorf("requests %+v", seen)
	}
}

func TestSmallResultStaysInItsRow(t *testing.T) {
	result, err := storeLarge(t.Context(), brokenStore{}, 10, "k", json.RawMessage(`"small"`))
	if err != nil || string(result) != `"small"` {
		t.Errorf("got %s, %v", result, err)
	}
	if _, err := storeLarge(t.Context(), brokenStore{}, 3, "k", json.RawMessage(`"small"`)); err == nil {
		t.Error("a large result was kept by a broken store")
	}
}

type brokenStore struct{}

func (brokenStore) Put(context.Context, string, []byte) (string, error) {
	return "", errors.New("out of disk")
}

// flakyStore is away for its first failures.
type flakyStore struct {
	Directory
	failures atomic.Int32
}

func (s *flakyStore) Put(ctx context.Context, key string, data []byte) (string, error) {
	if s.failures.Add(-1) >= 0 {
		return "", errors.New("503 Slow Down")
	}
	return s.Directory.Put(ctx, key, data)
}

func TestAnswerIsKeptWhileTheObjectStoreIsAway(t *testing.T) {
	for name, c := range map[string]struct {
		failures int32
		wait     time.Duration
		stored   bool
	}{
		"it comes back": {2, time.Minute, true},
		"it stays away": {1000, 10 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{})
			g := b.gpu(answers)
			b.instance("gpu-1", g.URL, 1)
			store := &flakyStore{Directory: Directory(t.TempDir())}
			store.failures.Store(c.failures)
			b.start(ServiceConfig{Objects: store}, func(t *tuning) { t.inlineBytes, t.storeWait = 1, c.wait })
			o := b.outcome(b.push(`{}`)[0])
			if o.Outcome != "done" || o.Attempt != 0 || strings.Contains(string(o.Result), "$object") != c.stored {
				t.Errorf("outcome %+v: %s", o, o.Result)
			}
			if calls, _ := g.seen(); calls != 1 {
				t.Errorf("the worker ran it %d times", calls)
			}
		})
	}
}
