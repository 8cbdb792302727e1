package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/penstock/penstock/pkg/scale/backend"
)

// The directories of platforms, and the file in each that its platform holds locked as long as it lives.
const (
	devPrefix = "penstock-dev-"
	devOwner  = "owner"
)

// holdDir marks the directory of a platform as in use until the returned file is closed, however this program ends.
func holdDir(dir string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, devOwner), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("mark the directory of logs: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("mark the directory of logs: %w", err)
	}
	return file, nil
}

// endLeftovers ends the workers of platforms in a directory that were killed: workers outlive the leader that started
// them, and nothing else would end them. It leaves alone what belongs to a platform that lives, or to another user.
func endLeftovers(ctx context.Context, in string, out io.Writer) error {
	entries, err := os.ReadDir(in)
	if err != nil {
		return fmt.Errorf("find workers of former platforms: %w", err)
	}
	for _, entry := range entries {
		dir := filepath.Join(in, entry.Name())
		if !strings.HasPrefix(entry.Name(), devPrefix) || !entry.IsDir() || !isOwn(dir) {
			continue
		}
		instances := filepath.Join(dir, "instances")
		if _, err := os.Stat(instances); err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, devOwner)); err != nil {
			continue // of a program that does not hold its directory: it may be alive
		}
		owner, err := holdDir(dir)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			continue
		}
		if err != nil {
			return err
		}
		local, err := backend.NewLocal(backend.LocalConfig{Dir: instances, Grace: 5 * time.Second})
		if err == nil {
			err = local.StopAll(ctx)
		}
		owner.Close()
		if err != nil {
			fmt.Fprintf(out, "workers of a former platform in %s: %v\n", dir, err)
		}
	}
	return nil
}

// isOwn says whether a directory belongs to this user: records of another one could name any process.
func isOwn(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil {
		return false
	}
	found, is := info.Sys().(*syscall.Stat_t)
	return is && info.IsDir() && int(found.Uid) == os.Geteuid()
}
