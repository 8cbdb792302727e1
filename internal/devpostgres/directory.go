package devpostgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shirou/gopsutil/v3/disk"
	"github.com/shirou/gopsutil/v3/mem"
)

// clusterData is the data in a kept directory.
const clusterData = "pgdata"

// directory is the directory of a cluster: its data, its log, and its lock.
type directory struct {
	path    string
	hold    *os.File      // see doc.go; every process of the cluster inherits it
	deleted chan struct{} // closed when the janitor has deleted the directory; nil if it is kept
}

func (d *directory) data() string { return filepath.Join(d.path, clusterData) }
func (d *directory) log() string  { return filepath.Join(d.path, "postgres.log") }
func (d *directory) kept() bool   { return d.deleted == nil }

// release gives the hold back and waits, for an ephemeral cluster, until the directory is deleted.
func (d *directory) release(ctx context.Context) error {
	d.hold.Close()
	if d.kept() {
		return nil
	}
	select {
	case <-d.deleted:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("delete %s: %w", d.path, ctx.Err())
	}
}

// password is random, and kept with a kept cluster so that its DSN stays the same.
func (d *directory) password() (string, error) {
	if !d.kept() {
		return rand.Text(), nil
	}
	path := filepath.Join(d.path, "password")
	text, err := os.ReadFile(path)
	if err == nil && len(text) > 0 {
		return strings.TrimSpace(string(text)), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read password: %w", err)
	}
	password := rand.Text()
	if err := os.WriteFile(path, []byte(password+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("keep password: %w", err)
	}
	return password, nil
}

// openDirectory makes a temporary directory, or opens the kept one for this process alone.
func openDirectory(ctx context.Context, cfg Config, acct account) (*directory, error) {
	if cfg.DataDir == "" {
		return temporaryDirectory(ctx, cfg, acct)
	}
	return keptDirectory(ctx, cfg, acct)
}

// memoryDir is a file system in memory, where Linux has one. Making and dropping databases is making and deleting
// hundreds of files: there it was measured 13 ms a clone, on a slow virtual disk 330 ms.
const memoryDir = "/dev/shm"

// memoryFree is how much must be free, on it and of all memory, for a cluster to live there.
const memoryFree = 4 << 30 // bytes

// memoryRoomy reports whether there is enough memory for a cluster in memoryDir. In a container
// memoryDir is tiny by default.
func memoryRoomy(ctx context.Context) bool {
	usage, err := disk.UsageWithContext(ctx, memoryDir)
	if err != nil || usage.Fstype != "tmpfs" || usage.Free < memoryFree {
		return false
	}
	memory, err := mem.VirtualMemoryWithContext(ctx)
	return err == nil && memory.Available >= memoryFree
}

// temporaryBases are the directories for temporary clusters, best first: what TMPDIR says, or else memory for
// a cluster that need not be durable.
func temporaryBases(cfg Config, tmpdir string, roomy bool) []string {
	switch {
	case tmpdir != "":
		return []string{tmpdir, "/tmp"}
	case cfg.Fast && roomy:
		return []string{memoryDir, "/tmp"}
	}
	return []string{"/tmp"}
}

// temporaryDirectory takes the first base where the socket path is not too long and the account may go.
func temporaryDirectory(ctx context.Context, cfg Config, acct account) (*directory, error) {
	var firstErr error
	for _, base := range temporaryBases(cfg, os.Getenv("TMPDIR"), memoryRoomy(ctx)) {
		path, err := makeTemporary(base, cfg, acct)
		if err != nil {
			firstErr = errors.Join(firstErr, err)
			continue
		}
		hold, deleted, err := startJanitor(path)
		if err != nil {
			return nil, errors.Join(err, os.Remove(path))
		}
		return &directory{path: path, hold: hold, deleted: deleted}, nil
	}
	return nil, firstErr
}

func makeTemporary(base string, cfg Config, acct account) (string, error) {
	base, err := filepath.EvalSymlinks(base)
	if err != nil {
		return "", fmt.Errorf("find temporary directory: %w", err)
	}
	if err := acct.reach(base); err != nil {
		return "", err
	}
	path, err := os.MkdirTemp(base, "penstock-pg-")
	if err != nil {
		return "", fmt.Errorf("create cluster directory: %w", err)
	}
	err = acct.own(path)
	if err == nil && cfg.SocketDir == "" {
		err = checkSocketPath(filepath.Join(path, clusterData), cfg.port())
	}
	if err != nil {
		return "", errors.Join(err, os.Remove(path))
	}
	return path, nil
}

// keptDirectory opens or creates cfg.DataDir and locks it.
func keptDirectory(ctx context.Context, cfg Config, acct account) (*directory, error) {
	path, err := createKept(cfg.DataDir, acct)
	if err != nil {
		return nil, err
	}
	if err := acct.reach(path); err != nil {
		return nil, err
	}
	hold, err := os.OpenFile(filepath.Join(path, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of data directory: %w", err)
	}
	if err := lock(ctx, hold, path, startTimeout); err != nil {
		hold.Close()
		return nil, err
	}
	return &directory{path: path, hold: hold}, nil
}

func createKept(path string, acct account) (string, error) {
	if _, err := os.Stat(filepath.Join(path, "PG_VERSION")); err == nil {
		return "", fmt.Errorf("data directory %s is itself a cluster made by other means: name another directory, "+
			"or start that cluster and give its DSN", path)
	}
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return "", fmt.Errorf("create data directory: %w", err)
		}
		if err := acct.own(path); err != nil { // a strict umask shuts others out
			return "", fmt.Errorf("create data directory: %w", err)
		}
	} else if err != nil {
		return "", fmt.Errorf("open data directory: %w", err)
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("open data directory: %w", err)
	}
	return filepath.EvalSymlinks(path)
}

// lock takes the file's lock for this process and all that inherit the file.
// A holder that lives is another instance: an error at once, or after a moment if it is just going.
// The cluster of a holder that died is shutting down: that is waited for.
func lock(ctx context.Context, f *os.File, dir string, timeout time.Duration) error {
	const grace = time.Second
	started := time.Now()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return noteOwner(f)
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return fmt.Errorf("lock data directory %s: %w", dir, err)
		}
		owner := readOwner(f)
		waited := time.Since(started)
		if waited > timeout || waited > grace && alive(ctx, owner) {
			return fmt.Errorf("data directory %s is in use by process %d: stop it, or name another data directory", dir,
				owner)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("lock data directory %s: %w", dir, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func noteOwner(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("write lock of data directory: %w", err)
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return fmt.Errorf("write lock of data directory: %w", err)
	}
	return nil
}

func readOwner(f *os.File) int32 {
	var text [20]byte
	n, _ := f.ReadAt(text[:], 0)
	pid, _ := strconv.ParseInt(strings.TrimSpace(string(text[:n])), 10, 32)
	return int32(pid)
}

func socketPath(dir string, port int) string {
	return filepath.Join(dir, ".s.PGSQL."+strconv.Itoa(port))
}

// checkSocketPath refuses what does not fit into the system's sockaddr_un: 108 bytes on Linux, 104 on macOS and BSD,
// one of them for the final zero.
func checkSocketPath(dir string, port int) error {
	limit := 103
	if runtime.GOOS == "linux" {
		limit = 107
	}
	path := socketPath(dir, port)
	if len(path) > limit {
		return fmt.Errorf("socket path %s is %d bytes long, and the system allows %d: use a shorter data directory, "+
			"or set SocketDir to one", path, len(path), limit)
	}
	return nil
}
