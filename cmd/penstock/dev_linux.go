package main

import "syscall"

// endsWithParent stops a child when this program is killed: nobody else would.
func endsWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}
