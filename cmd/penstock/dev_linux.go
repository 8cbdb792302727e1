package main

import "syscall"

// endsWithParent stops a child when this program is killed: no other process would.
func endsWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}
