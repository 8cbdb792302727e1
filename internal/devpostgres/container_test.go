package devpostgres

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// needEngine is for tests that run a real container: they need Docker or Podman, and fetch the image if it is not there.
func needEngine(t *testing.T) {
	t.Helper()
	if os.Getenv("PENSTOCK_TEST_CONTAINER") == "" {
		t.Skip("runs a container: set PENSTOCK_TEST_CONTAINER=1")
	}
	t.Setenv("PENSTOCK_ALLOW_DOWNLOAD", "1")
}

func startInContainer(t *testing.T, cfg Config) *Server {
	t.Helper()
	var tried attempts
	server, err := findContainer(t.Context(), cfg.withDefaults(), maker{}, &tried)
	if err != nil {
		t.Fatal(err)
	}
	if server == nil {
		t.Fatal(&NotFoundError{Attempts: tried})
	}
	stopAfter(t, server)
	return server
}

func TestContainerServesAndIsRemoved(t *testing.T) {
	needEngine(t)
	server := startInContainer(t, Config{Fast: true, Settings: map[string]string{"work_mem": "7MB"}})
	for setting, want := range map[string]string{"fsync": "off", "work_mem": "7MB", "max_connections": "200"} {
		if got := query(t, server.ConnString(), "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	began := time.Now()
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("stopping took %v: the server did not obey its supervisor", took)
	}
	if names := containers(t, server.container.engine); strings.Contains(names, server.container.name) {
		t.Errorf("the container still exists: %s", names)
	}
}

func TestKilledParentLeavesNoContainer(t *testing.T) {
	needEngine(t)
	helper, dsn := startHelper(t, "container:")
	query(t, dsn, "SELECT 'up'")
	engine := usedEngine(t)
	before := containers(t, engine)
	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the container is gone", func() bool {
		return containers(t, engine) != before
	})
	if _, err := tryQuery(t.Context(), dsn, "SELECT 'up'"); err == nil {
		t.Error("the server in the container still answers")
	}
}

func TestContainerKeepsDataDirectory(t *testing.T) {
	needEngine(t)
	dir := keptDir(t)
	first := startInContainer(t, Config{DataDir: dir})
	exec1(t, first.ConnString(), "CREATE TABLE kept AS SELECT 'still here' AS word")
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := startInContainer(t, Config{DataDir: dir})
	if got := query(t, second.ConnString(), "SELECT word FROM kept"); got != "still here" {
		t.Errorf("kept data: got %q", got)
	}
}

func TestKeptClusterStaysWithBinariesOrContainer(t *testing.T) {
	nothingInstalled(t)
	for place, want := range map[string]string{
		containerData: "binaries: the data directory was made in a container",
		clusterData:   "containers: the data directory was made by binaries",
	} {
		dir := keptDir(t)
		if err := os.MkdirAll(filepath.Join(dir, place), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, place, "PG_VERSION"), []byte("17\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := find(t.Context(), Config{DataDir: dir}, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestEngineIsUsedOnlyIfItRunsAndHasOrMayFetchTheImage(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		cfg    Config
		want   string // part of the error; empty: the engine is used
	}{
		"it does not run":        {`echo no daemon; exit 1`, Config{}, "no daemon"},
		"it has the image":       {`exit 0`, Config{}, ""},
		"no image, no consent":   {`[ "$1" = version ]`, Config{}, "was not allowed"},
		"no image, consent":      {`[ "$1" = version ]`, Config{AllowDownload: true}, ""},
		"no image, a person yes": {`[ "$1" = version ]`, Config{Confirm: func(string) bool { return true }}, ""},
		"no image, a person no":  {`[ "$1" = version ]`, Config{Confirm: func(string) bool { return false }}, "was not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeProgram(t, filepath.Join(dir, "docker"), "#!/bin/sh\n"+c.script+"\n")
			t.Setenv("PATH", dir)
			err := usableEngine(t.Context(), c.cfg, "docker")
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// usedEngine is the one findContainer takes on this machine.
func usedEngine(t *testing.T) string {
	t.Helper()
	for _, engine := range []string{"docker", "podman"} {
		if usableEngine(t.Context(), Config{AllowDownload: true}, engine) == nil {
			return engine
		}
	}
	t.Fatal("no engine works")
	return ""
}

func containers(t *testing.T, engine string) string {
	t.Helper()
	names, err := runEngine(t.Context(), engine, "ps", "--all", "--filter", "name=penstock-", "--format", "{{.Names}}")
	if err != nil {
		t.Fatal(err)
	}
	return names
}
