//go:build !linux

package main

import "syscall"

// endsWithParent keeps Ctrl-C from the children: they are stopped in order.
func endsWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
