package devpostgres

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
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

// Programs that start at once find no seed, and each makes it.
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
