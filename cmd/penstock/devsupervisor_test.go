package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// lineWriter passes on what is written.
type lineWriter chan string

func (l lineWriter) Write(text []byte) (int, error) {
	l <- string(text)
	return len(text), nil
}

// A process that has ended, and is to be started again, stays away once its supervisor is stopped.
func TestSupervisorStopsWhileAProcessIsToBeStartedAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "program")
	// Its first run ends at once, and a second one would last.
	script := "#!/bin/sh\nif [ -e " + dir + "/again ]; then exec sleep 120; fi\ntouch " + dir + "/again\nexit 1\n"
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	out := make(lineWriter, 16)
	s := &supervisor{logs: dir, out: out}
	c := &child{name: "program", path: path, log: log, gone: make(chan struct{})}
	first, err := c.spawn("listen=", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.children = []*child{c}
	go s.supervise(c, first, "listen=")
	if text := <-out; !strings.Contains(text, "starting it again") {
		t.Fatalf("got %s", text)
	}
	stopped := make(chan struct{})
	go func() {
		s.stop(out)
		close(stopped)
	}()
	select {
	case <-stopped:
	case text := <-out:
		t.Errorf("the supervisor says %s", text)
	case <-time.After(time.Minute):
		t.Error("the supervisor does not stop")
	}
	c.mu.Lock()
	_ = c.process.Kill() // none, unless the test has failed
	c.mu.Unlock()
	<-c.gone
}
