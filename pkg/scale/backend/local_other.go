//go:build !unix

package backend

import (
	"context"
	"os"
	"syscall"
)

func ownSession() *syscall.SysProcAttr { return nil }

// signalGroup ends the first process only: there are no groups.
func signalGroup(group int, sig syscall.Signal) error { return signalProcess(group, sig) }

func signalProcess(pid int, _ syscall.Signal) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	return p.Kill()
}

func lockDir(context.Context, string) (unlock func(), err error) { return func() {}, nil }
