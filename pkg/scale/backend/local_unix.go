//go:build unix

package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// ownSession keeps a process alive when the leader and its terminal are gone. It leads a group of its own.
func ownSession() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

func signalGroup(group int, sig syscall.Signal) error { return syscall.Kill(-group, sig) }

func signalProcess(pid int, sig syscall.Signal) error { return syscall.Kill(pid, sig) }

// lockEvery is how often a lock that another leader holds is tried again.
const lockEvery = 20 * time.Millisecond

// lockDir excludes other leaders of this machine: a former one may still be about to start something. It waits
// until ctx ends.
func lockDir(ctx context.Context, dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the directory of local instances: %w", err)
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
			select {
			case <-time.After(lockEvery):
				continue
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		file.Close()
		return nil, fmt.Errorf("lock the directory of local instances: %w", err)
	}
}
