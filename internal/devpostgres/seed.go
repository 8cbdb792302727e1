package devpostgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A seed is a data directory in the cache, of which fast clusters are copies: a run of all tests starts some forty
// clusters, and initdb alone takes 1.3 s of CPU. Only ephemeral clusters that give up syncing are copies, since all
// copies have one system identifier.

// Contents are data that a fast ephemeral cluster has from its start. They are written once and kept in the seed.
// Other clusters, servers given by DSN and containers start without them, as do all where the cache cannot be used.
type Contents struct {
	// Key identifies the data. What Write writes otherwise needs another key.
	Key string
	// Write fills a server that was started for it alone.
	Write func(ctx context.Context, server *Server) error
}

// seedUnused is how long a seed is kept after its last use. Each change of the contents leaves one.
const seedUnused = 7 * 24 * time.Hour

// fill makes a new cluster in the empty directory work: as a copy of the seed, or by initdb. Whatever is wrong with
// the cache costs the time of initdb and nothing else.
func fill(ctx context.Context, cfg Config, acct account, bin binaries, dir *directory, work string) error {
	if !cfg.Fast || dir.kept() || cfg.unseeded {
		return initdb(ctx, cfg, acct, bin, dir, work)
	}
	if copySeed(ctx, cfg, acct, bin, dir, work) == nil {
		return nil
	}
	if err := empty(acct, work); err != nil {
		return fmt.Errorf("remove half a copy: %w", err)
	}
	return initdb(ctx, cfg, acct, bin, dir, work)
}

// copySeed copies the seed to work, and makes it first where there is none.
func copySeed(ctx context.Context, cfg Config, acct account, bin binaries, dir *directory, work string) error {
	seed, err := seedPath(cfg, acct, bin)
	if err != nil {
		return err
	}
	if _, err := os.Stat(seed); err != nil {
		if err := makeSeed(ctx, cfg, acct, bin, seed); err != nil {
			return err
		}
	}
	now := time.Now()
	if err := os.Chtimes(seed, now, now); err != nil {
		return err
	}
	if err := copyTree(ctx, acct, dir, seed, work, copyScript); err != nil {
		return err
	}
	err = checkCopy(work)
	if err != nil { // the next process makes it again
		_ = os.Rename(seed, filepath.Join(filepath.Dir(seed), fmt.Sprintf("unfinished-seed-%d", now.UnixNano())))
	}
	return err
}

// seedPath is the place of the seed. Its name has a hash of everything that the cluster depends on: the programs, the
// user, the arguments, the access rules, the contents, and the time zone, which initdb writes to postgresql.conf.
func seedPath(cfg Config, acct account, bin binaries) (string, error) {
	cache, err := cfg.cacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(bin.program(name))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d %d\n", bin.program(name), info.Size(), info.ModTime().UnixNano())
	}
	zone, _ := os.Readlink("/etc/localtime") // empty: no link
	fmt.Fprintf(sum, "%s %d %q %q %q %q", bin.version, acct.uid, initdbArgs(true), accessRules, os.Getenv("TZ"), zone)
	if cfg.Contents != nil {
		fmt.Fprintf(sum, " %q", cfg.Contents.Key)
	}
	return filepath.Join(cache, "seed-"+hex.EncodeToString(sum.Sum(nil)[:8])), nil
}

// makeSeed makes the seed unless another process has made it meanwhile: a file lock admits one at a time. The lock of a
// killed process is free, and what that process left has another name than a seed.
func makeSeed(ctx context.Context, cfg Config, acct account, bin binaries, seed string) error {
	cache := filepath.Dir(seed)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	if err := acct.reach(cache); err != nil {
		return err
	}
	unlock, err := lockSeeds(ctx, cache)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(seed); err == nil {
		return nil
	}
	removeUnused(cache)

	server, err := startFirst(ctx, cfg, acct, bin)
	if err != nil {
		return err
	}
	err = server.Halt(ctx, Fast)
	if err == nil {
		err = keepSeed(ctx, acct, server.cluster.dir, seed)
	}
	return errors.Join(err, server.Stop(ctx))
}

// lockSeeds waits until no other process makes seeds in the cache.
func lockSeeds(ctx context.Context, cache string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(cache, "seeds.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil // the lock goes with its file
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(err, file.Close())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), file.Close())
		}
	}
}

// startFirst starts the cluster that becomes the seed: by initdb, with the contents.
func startFirst(ctx context.Context, cfg Config, acct account, bin binaries) (*Server, error) {
	// The log of a seed is copied with it, so that little of it is kept.
	server, err := startCluster(ctx, Config{
		Fast: true, unseeded: true,
		Settings: map[string]string{"max_wal_size": "32MB", "min_wal_size": "32MB"},
	}, acct, bin)
	if err != nil || cfg.Contents == nil {
		return server, err
	}
	if err := cfg.Contents.Write(ctx, server); err != nil {
		return nil, errors.Join(fmt.Errorf("write contents: %w", err), server.Stop(ctx))
	}
	return server, nil
}

// contentsFile is the file of a seed that has the hash of its contents, see hashTree.
const contentsFile = "penstock_seed"

// checkCopy compares a copy with what its seed had when it was made. A seed that is deleted during the copy, with the
// cache, loses its files one by one.
func checkCopy(work string) error {
	want, err := os.ReadFile(filepath.Join(work, contentsFile))
	if err != nil {
		return err
	}
	found, err := hashTree(work)
	if err != nil {
		return err
	}
	if found != string(want) {
		return fmt.Errorf("the copy of the seed in %s is not complete", work)
	}
	return nil
}

// hashTree hashes the names and sizes of all files and directories below root but contentsFile.
func hashTree(root string) (string, error) {
	sum := sha256.New()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Name() == contentsFile {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		size := info.Size()
		if entry.IsDir() {
			size = 0 // depends on the file system
		}
		fmt.Fprintf(sum, "%q %d\n", strings.TrimPrefix(path, root), size)
		return nil
	})
	return hex.EncodeToString(sum.Sum(nil)), err
}

// keepSeed copies the cluster into the cache, complete or not at all.
func keepSeed(ctx context.Context, acct account, dir *directory, seed string) error {
	unfinished, err := os.MkdirTemp(filepath.Dir(seed), "unfinished-seed-")
	if err != nil {
		return err
	}
	err = acct.own(unfinished)
	if err == nil {
		err = copyTree(ctx, acct, dir, dir.data(), unfinished, copyScript)
	}
	var hash string
	if err == nil {
		hash, err = hashTree(unfinished)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(unfinished, contentsFile), []byte(hash), 0o644) //nolint:gosec // no secret
	}
	syscall.Sync() // it outlives a crash of the machine
	if err == nil {
		err = os.Rename(unfinished, seed)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	return nil
}

// removeUnused removes seeds that nobody has copied for long, and what killed processes left unfinished. The caller
// has the lock.
func removeUnused(cache string) {
	unfinished, _ := filepath.Glob(filepath.Join(cache, "unfinished-seed-*"))
	seeds, _ := filepath.Glob(filepath.Join(cache, "seed-*"))
	for _, seed := range seeds {
		info, err := os.Stat(seed)
		if err != nil || time.Since(info.ModTime()) < seedUnused {
			continue
		}
		// Under its new name nobody begins to copy it.
		gone := filepath.Join(cache, "unfinished-"+filepath.Base(seed))
		if os.Rename(seed, gone) == nil {
			unfinished = append(unfinished, gone)
		}
	}
	for _, path := range unfinished {
		_ = os.RemoveAll(path) // the next process tries again
	}
}

const copyScript = scriptPath + `; cp -pR "$1/." "$2"`

// copyTree copies the contents of one directory to another one, as the user of the server: it cannot be led to a file
// that this user may not read.
func copyTree(ctx context.Context, acct account, dir *directory, from, to, script string) error {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, "penstock-seed", from, to)
	cmd.ExtraFiles = []*os.File{dir.hold}
	cmd.SysProcAttr = acct.attributes()
	cmd.Dir = "/"
	cmd.Env = serverEnvironment()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// empty makes a directory as it was when it was made.
func empty(acct account, path string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return acct.own(path)
}
