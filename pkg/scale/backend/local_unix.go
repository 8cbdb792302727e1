//go:build unix

package backend

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// ownSession keeps a process alive when the leader and its terminal are gone.
func ownSession() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// lockDir excludes other leaders of this machine: a former one may still be about to start something.
func lockDir(dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the directory of local instances: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock the directory of local instances: %w", err)
	}
	return func() { file.Close() }, nil
}
