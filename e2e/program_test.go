// Package e2e_test starts the real programs, kills them, and looks at what is left in the database.
package e2e_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// binaries builds the programs once for all tests, into a directory that outlives none of them. Programs that `make build`
// has left in bin are copied first: the build links only those that are not up to date.
var binaries = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "penstock-e2e-")
	if err != nil {
		return "", err
	}
	for _, name := range []string{"gateway", "leader", "penstock", "tasknode", "worker"} {
		if text, err := os.ReadFile(filepath.Join("../bin", name)); err == nil {
			if err := os.WriteFile(filepath.Join(dir, name), text, 0o755); err != nil { //nolint:gosec // a program
				return "", err
			}
		}
	}
	out, err := exec.CommandContext(context.Background(), "go", "build", "-o", dir+"/", "../cmd/...").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	worker := exec.CommandContext(context.Background(), "go", "build", "-o", filepath.Join(dir, "worker"), ".")
	worker.Dir = "../examples/worker" // a module of its own
	if out, err = worker.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build of the worker: %w\n%s", err, out)
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	if address := os.Getenv(envWorker); address != "" { // started by a leader, see scale_test.go
		fmt.Fprintln(os.Stderr, serveWorker(address))
		os.Exit(1)
	}
	code := m.Run()
	if dir, err := binaries(); err == nil {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// program is a started process and what it says.
type program struct {
	t     *testing.T
	name  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended

	mu    sync.Mutex
	lines []string
	news  chan struct{} // closed at the next line
}

// begun has the programs that each test started.
var begun = struct {
	sync.Mutex
	programs map[string][]*program
}{programs: map[string][]*program{}}

// programsOf returns the programs that a test and its subtests have started.
func programsOf(test string) []*program {
	begun.Lock()
	defer begun.Unlock()
	return slices.Clone(begun.programs[test])
}

// testOf is the name of a test without those of its subtests.
func testOf(t *testing.T) string {
	name, _, _ := strings.Cut(t.Name(), "/")
	return name
}

// start runs one of the programs until the test ends. The environment of the test does not reach it.
func start(t *testing.T, binary, name string, args ...string) *program {
	t.Helper()
	return startWith(t, nil, binary, name, args...)
}

// startWith is start with variables of the environment, as in NAME=value.
func startWith(t *testing.T, env []string, binary, name string, args ...string) *program {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{t: t, name: name, ended: make(chan struct{}), news: make(chan struct{})}
	p.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), filepath.Join(dir, binary), args...)
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}, env...)
	said, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = p.cmd.Stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	begun.Lock()
	begun.programs[testOf(t)] = append(begun.programs[testOf(t)], p)
	begun.Unlock()
	go func() {
		p.read(said)
		_ = p.cmd.Wait() // how it ended is in ProcessState
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("%s said:\n%s", p.name, strings.Join(p.said(), "\n"))
		}
	})
	return p
}

func (p *program) read(r io.Reader) {
	for scanner := bufio.NewScanner(r); scanner.Scan(); {
		p.mu.Lock()
		p.lines = append(p.lines, scanner.Text())
		close(p.news)
		p.news = make(chan struct{})
		p.mu.Unlock()
	}
}

func (p *program) said() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.lines...)
}

// says waits up to a minute for a line with this text and returns it.
func (p *program) says(text string) string {
	p.t.Helper()
	timeout := time.After(time.Minute)
	for {
		p.mu.Lock()
		news := p.news
		p.mu.Unlock()
		for _, line := range p.said() {
			if strings.Contains(line, text) {
				return line
			}
		}
		select {
		case <-news:
		case <-p.ended:
			p.t.Fatalf("%s ended without saying %q", p.name, text)
		case <-timeout:
			p.t.Fatalf("%s did not say %q within a minute", p.name, text)
		}
	}
}

func (p *program) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatalf("signal %s: %v", p.name, err)
	}
}

// exit waits up to a minute for the end of the process and returns its status, -1 if a signal killed it.
func (p *program) exit() int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(time.Minute):
		p.t.Fatalf("%s has not ended within a minute", p.name)
		return 0
	}
}

// value reads a value from a line of a text log: key=value.
func value(line, key string) string {
	for _, field := range strings.Fields(line) {
		if v, found := strings.CutPrefix(field, key+"="); found {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}

// eventually waits for a condition that running programs bring about.
func eventually(t *testing.T, within time.Duration, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

var errStatus = errors.New("unexpected status")
