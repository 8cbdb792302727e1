package devpostgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A seed is a directory as initdb made it, kept in the cache so that the next fast clusters are copies of it: initdb
// takes 1.3 s of CPU, and a run of all tests starts some forty clusters. Only ephemeral clusters that give up syncing
// are copies, since all copies have one system identifier.

// fill makes a new cluster in the empty directory work: as a copy of the seed, or by initdb, whose result is the seed
// of those that follow. Whatever is wrong with the cache costs the time of initdb and nothing else.
func fill(ctx context.Context, cfg Config, acct account, bin binaries, dir *directory, work string,
	args []string,
) error {
	if !cfg.Fast || dir.kept() {
		return runInitdb(ctx, acct, bin, dir, work, args)
	}
	seed, err := seedPath(cfg, acct, bin, args)
	if err != nil {
		return runInitdb(ctx, acct, bin, dir, work, args)
	}
	if _, err := os.Stat(seed); err == nil {
		if copyTree(ctx, acct, dir, seed, work, copyScript) == nil {
			return nil
		}
		if err := empty(acct, work); err != nil {
			return fmt.Errorf("remove half a copy: %w", err)
		}
	}
	if err := runInitdb(ctx, acct, bin, dir, work, args); err != nil {
		return err
	}
	_ = keepSeed(ctx, acct, dir, work, seed) // the next cluster takes as long as this one
	return nil
}

// seedPath is the place of the seed. Its name has a hash of everything that initdb's result depends on: the programs,
// the user, the arguments, and the time zone, which initdb writes to postgresql.conf.
func seedPath(cfg Config, acct account, bin binaries, args []string) (string, error) {
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
	fmt.Fprintf(sum, "%s %d %q %q %q", bin.version, acct.uid, args, os.Getenv("TZ"), zone)
	return filepath.Join(cache, "seed-"+hex.EncodeToString(sum.Sum(nil)[:8])), nil
}

// keepSeed copies a new cluster into the cache, complete or not at all. Of two programs that do so at once, one wins.
func keepSeed(ctx context.Context, acct account, dir *directory, work, seed string) error {
	cache := filepath.Dir(seed)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	if err := acct.reach(cache); err != nil {
		return err
	}
	unfinished, err := os.MkdirTemp(cache, "unfinished-seed-")
	if err != nil {
		return err
	}
	err = acct.own(unfinished)
	if err == nil {
		err = copyTree(ctx, acct, dir, work, unfinished, copyScript+" && sync") // it outlives a crash of the machine
	}
	if err == nil {
		err = os.Rename(unfinished, seed)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	return nil
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
