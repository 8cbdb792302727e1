package main

import (
	"os/exec"
	"testing"
)

// A program that runs has resident memory, one that has ended has none.
func TestResidentMemoryIsThatOfTheRunningProgram(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "3600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	p := &process{cmd: cmd, ended: ended}
	if n := p.resident(); n < 1<<10 || n > 1<<30 {
		t.Errorf("sleep takes %d bytes", n)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	close(ended)
	if n := p.resident(); n != 0 {
		t.Errorf("a program that has ended takes %d bytes", n)
	}
}
