package main

import "runtime"

// childThread runs functions on one thread of the operating system that lives as long as the
// harness: the kernel ends children with the thread that made them.
var childThread = func() chan func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
}()

func onChildThread(f func() error) error {
	answer := make(chan error)
	childThread <- func() { answer <- f() }
	return <-answer
}
