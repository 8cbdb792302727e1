package devpostgres

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// seeds are the paths of the seeds in a cache.
func seeds(t *testing.T, cache string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(cache, "*seed-*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// identifier is that of a cluster, which initdb chose.
func identifier(t *testing.T, server *Server) string {
	t.Helper()
	return query(t, server.ConnString(), `SELECT system_identifier::text FROM pg_control_system()`)
}

func TestFastClustersAreCopiesOfOneThatInitdbMade(t *testing.T) {
	cache := openTempDir(t)
	first := identifier(t, start(t, Config{Fast: true, CacheDir: cache}))
	kept := seeds(t, cache)
	if len(kept) != 1 {
		t.Fatalf("the cache has %v, want one seed", kept)
	}
	if second := identifier(t, start(t, Config{Fast: true, CacheDir: cache})); second != first {
		t.Errorf("the second cluster is %s, want a copy of %s", second, first)
	}
	for name, cfg := range map[string]Config{
		"durable": {CacheDir: cache},
		"kept":    {CacheDir: cache, Fast: true, DataDir: keptDir(t)},
	} {
		if id := identifier(t, start(t, cfg)); id == first {
			t.Errorf("the %s cluster is a copy", name)
		}
	}
	// What initdb would do otherwise is another seed.
	t.Setenv("TZ", "Pacific/Chatham")
	if id := identifier(t, start(t, Config{Fast: true, CacheDir: cache})); id == first || len(seeds(t, cache)) != 2 {
		t.Errorf("in another time zone the cluster is a copy: %t, of seeds %v", id == first, seeds(t, cache))
	}
}

func TestABrokenSeedCostsTheTimeOfInitdbAlone(t *testing.T) {
	cache := openTempDir(t)
	first := identifier(t, start(t, Config{Fast: true, CacheDir: cache}))
	for _, seed := range seeds(t, cache) {
		if err := os.RemoveAll(seed); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(seed, []byte("no directory"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if id := identifier(t, start(t, Config{Fast: true, CacheDir: cache})); id == first {
		t.Error("a cluster is the copy of a seed that is gone")
	}
	none := filepath.Join(cache, "file", "below")
	if err := os.WriteFile(filepath.Dir(none), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	identifier(t, start(t, Config{Fast: true, CacheDir: none}))
}

// A seed that is copied while the cache is deleted lacks files, and its directory is the last to go. No server starts on
// such a copy, and the seed is made anew.
func TestNoServerStartsOnAPartOfASeed(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"a file is gone":  os.Remove,
		"a file is short": func(path string) error { return os.Truncate(path, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			cache := openTempDir(t)
			first := identifier(t, start(t, Config{Fast: true, CacheDir: cache}))
			if err := damage(filepath.Join(seeds(t, cache)[0], "base", "1", "2619")); err != nil { // rows of pg_statistic
				t.Fatal(err)
			}
			if id := identifier(t, start(t, Config{Fast: true, CacheDir: cache})); id == first {
				t.Error("a server started on a part of the seed")
			}
			made := identifier(t, start(t, Config{Fast: true, CacheDir: cache}))
			if id := identifier(t, start(t, Config{Fast: true, CacheDir: cache})); made == first || id != made {
				t.Errorf("the seed was not made anew: clusters %s and %s", made, id)
			}
		})
	}
}

// greeting are contents whose writes are counted.
func greeting(key string, writes *atomic.Int32) *Contents {
	return &Contents{Key: key, Write: func(ctx context.Context, server *Server) error {
		writes.Add(1)
		conn, err := pgx.Connect(ctx, server.ConnString())
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		_, err = conn.Exec(ctx, "CREATE TABLE greeting AS SELECT 'hello '||$1::text AS text", key)
		return err
	}}
}

// Programs that start at once find no seed. One makes it, and the others wait.
func TestContentsAreWrittenOnceForEachKey(t *testing.T) {
	cache := openTempDir(t)
	var writes atomic.Int32
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			server := start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("ann", &writes)})
			if text := query(t, server.ConnString(), "SELECT text FROM greeting"); text != "hello ann" {
				t.Errorf("the cluster has %q", text)
			}
		})
	}
	all.Wait()
	if n := writes.Load(); n != 1 {
		t.Errorf("the contents were written %d times for three clusters", n)
	}
	changed := start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("bob", &writes)})
	if text := query(t, changed.ConnString(), "SELECT text FROM greeting"); text != "hello bob" || writes.Load() != 2 {
		t.Errorf("under another key the cluster has %q, after %d writes", text, writes.Load())
	}
}

// A program that was killed while it made the seed leaves a lock that is free, and a directory under another name.
func TestAHalfMadeSeedIsNotUsed(t *testing.T) {
	cache := openTempDir(t)
	half := filepath.Join(cache, "unfinished-seed-1234")
	if err := os.MkdirAll(filepath.Join(half, "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cache, "seeds.lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var writes atomic.Int32
	server := start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("ann", &writes)})
	if text := query(t, server.ConnString(), "SELECT text FROM greeting"); text != "hello ann" {
		t.Errorf("the cluster has %q", text)
	}
	if exists(half) || len(seeds(t, cache)) != 1 {
		t.Errorf("the cache has %v, want one seed and nothing that is unfinished", seeds(t, cache))
	}
}

// What could not be written is in no seed, and costs the contents alone.
func TestContentsThatCannotBeWrittenLeaveNoSeed(t *testing.T) {
	cache := openTempDir(t)
	none := &Contents{Key: "none", Write: func(context.Context, *Server) error { return errors.New("no") }}
	identifier(t, start(t, Config{Fast: true, CacheDir: cache, Contents: none}))
	if kept := seeds(t, cache); len(kept) != 0 {
		t.Errorf("the cache has %v", kept)
	}
}

func TestSeedsThatAreNotUsedAreRemoved(t *testing.T) {
	cache := openTempDir(t)
	var writes atomic.Int32
	identifier(t, start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("ann", &writes)}))
	ann := seeds(t, cache)[0]
	long := time.Now().Add(-seedUnused - time.Hour)
	if err := os.Chtimes(ann, long, long); err != nil {
		t.Fatal(err)
	}
	// A use counts, however old the seed is.
	identifier(t, start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("ann", &writes)}))
	identifier(t, start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("bob", &writes)}))
	if !exists(ann) || len(seeds(t, cache)) != 2 {
		t.Fatalf("the cache has %v, want %s beside another", seeds(t, cache), ann)
	}
	if err := os.Chtimes(ann, long, long); err != nil {
		t.Fatal(err)
	}
	identifier(t, start(t, Config{Fast: true, CacheDir: cache, Contents: greeting("cid", &writes)}))
	if exists(ann) || len(seeds(t, cache)) != 2 {
		t.Errorf("the cache has %v, among them one that nobody has used for a week", seeds(t, cache))
	}
}

// Programs that start at once find no seed, and one makes it.
func TestSeedsThatAreMadeAtOnceLeaveOne(t *testing.T) {
	cache := openTempDir(t)
	var all sync.WaitGroup
	servers := make([]*Server, 3)
	for i := range servers {
		all.Go(func() {
			server, err := Start(t.Context(), Config{Fast: true, CacheDir: cache})
			if err != nil {
				t.Errorf("start server %d: %v", i, err)
				return
			}
			servers[i] = server
		})
	}
	all.Wait()
	for _, server := range servers {
		if server != nil {
			identifier(t, server)
			if err := server.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	if kept := seeds(t, cache); len(kept) != 1 {
		t.Errorf("the cache has %v, want one seed and nothing that is unfinished", kept)
	}
}
