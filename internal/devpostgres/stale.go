package devpostgres

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/shirou/gopsutil/v3/process"
)

// clearStale removes what a dead postmaster left behind: its pid file and its socket's lock file.
// Postgres itself takes any live process with that id for the postmaster: also a zombie that is not
// reaped (in a container without an init), and an unrelated process that got the id since. The
// caller holds the cluster, so no other start interferes.
func clearStale(ctx context.Context, data, socket string) error {
	pidFile := filepath.Join(data, "postmaster.pid")
	lines, err := readLines(pidFile)
	if errors.Is(err, fs.ErrNotExist) {
		return clearStaleSocket(ctx, data, socket)
	}
	if err != nil {
		return fmt.Errorf("read pid file: %w", err)
	}
	if pid, running := postmaster(ctx, lines, data); running {
		return fmt.Errorf("data directory %s is in use by the Postgres with process id %d, which was started by "+
			"other means: stop it first", data, pid)
	}
	if err := os.Remove(pidFile); err != nil {
		return fmt.Errorf("remove stale pid file: %w", err)
	}
	return clearStaleSocket(ctx, data, socket)
}

// clearStaleSocket removes the socket's lock file only if it is of this very data directory (its second line).
func clearStaleSocket(ctx context.Context, data, socket string) error {
	lockFile := socket + ".lock"
	lines, err := readLines(lockFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read socket lock file: %w", err)
	}
	if len(lines) < 2 || lines[1] != data {
		return nil
	}
	if _, running := postmaster(ctx, lines, data); running {
		return nil
	}
	if err := os.Remove(lockFile); err != nil {
		return fmt.Errorf("remove stale socket lock file: %w", err)
	}
	return nil
}

// postmaster reports whether the process named in the first line of a pid file is a live server of
// directory data.
func postmaster(ctx context.Context, lines []string, data string) (pid int32, running bool) {
	if len(lines) == 0 {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(lines[0]), 10, 32)
	if err != nil || n <= 0 {
		return 0, false
	}
	p, err := process.NewProcessWithContext(ctx, int32(n))
	if err != nil || isZombie(ctx, p) {
		return int32(n), false
	}
	if dir, err := p.CwdWithContext(ctx); err == nil && dir != "" {
		return int32(n), dir == data
	}
	line, err := p.CmdlineWithContext(ctx)
	return int32(n), err == nil && strings.Contains(line, data)
}

func isZombie(ctx context.Context, p *process.Process) bool {
	status, err := p.StatusWithContext(ctx)
	return err == nil && len(status) > 0 && status[0] == process.Zombie
}

// alive reports whether a process runs and is not a zombie.
func alive(ctx context.Context, pid int32) bool {
	p, err := process.NewProcessWithContext(ctx, pid)
	return err == nil && !isZombie(ctx, p)
}

func readLines(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimRight(string(text), "\n"), "\n"), nil
}
