package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// supervisor starts the programs of `penstock dev`, starts one that dies again, and stops all of them.
type supervisor struct {
	logs string
	out  io.Writer
	env  []string

	mu       sync.Mutex
	children []*child
	stopping bool
}

// child is a program that the supervisor runs: its process, and those that were started in its place.
type child struct {
	name, path string
	args, env  []string
	log        *os.File

	mu      sync.Mutex
	process *os.Process
	gone    chan struct{} // closed when it has ended for good
}

func newSupervisor(logs string, out io.Writer) (*supervisor, error) {
	for _, name := range []string{"leader", "tasknode", "gateway", "worker"} {
		if _, err := beside(name); err != nil {
			return nil, err
		}
	}
	return &supervisor{logs: logs, out: out}, nil
}

// patience is how long a program may take until it says that it serves.
const patience = 30 * time.Second

// start runs the program that the name begins with ("tasknode-2" is a tasknode), and returns the word that follows
// sign in what it says first.
func (s *supervisor) start(ctx context.Context, name, sign string, args ...string) (string, error) {
	program, _, _ := strings.Cut(name, "-")
	path, err := beside(program)
	if err != nil {
		return "", err
	}
	log, err := os.Create(filepath.Join(s.logs, name+".log")) //nolint:gosec // a name of ours in a directory of ours
	if err != nil {
		return "", fmt.Errorf("make log: %w", err)
	}
	c := &child{name: name, path: path, args: args, env: s.env, log: log, gone: make(chan struct{})}
	said := make(chan string, 1)
	first, err := c.spawn(sign, said)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	s.children = append(s.children, c)
	s.mu.Unlock()
	go s.supervise(c, first, sign)
	select {
	case word := <-said:
		c.fixAddress(word)
		return word, nil
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(patience):
		return "", fmt.Errorf("%s did not say %q within %s; see %s", name, sign, patience, log.Name())
	}
}

// fixAddress makes later processes of the program listen where the first one did: on the address that it said, in place
// of the argument 127.0.0.1:0. One of localhost:0, a debug listener, has another port each time.
func (c *child) fixAddress(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, arg := range c.args {
		if arg == "127.0.0.1:0" {
			c.args[i] = strings.TrimPrefix(address, "http://")
		}
	}
}

func (c *child) spawn(sign string, said chan<- string) (*exec.Cmd, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cmd := exec.Command(c.path, c.args...) //nolint:gosec,noctx // a program of ours, which stop ends
	cmd.Env = append(os.Environ(), c.env...)
	cmd.SysProcAttr = endsWithParent()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	c.process = cmd.Process
	go c.record(r, sign, said)
	return cmd, nil
}

// record copies what the process says to its log, and passes on the first word after sign.
func (c *child) record(r *os.File, sign string, said chan<- string) {
	defer r.Close()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		fmt.Fprintln(c.log, line)
		if _, rest, found := strings.Cut(line, sign); found && said != nil {
			word, _, _ := strings.Cut(rest, " ")
			said <- word
			said = nil
		}
	}
}

// restartPause is how long a process that has ended stays away.
const restartPause = 500 * time.Millisecond

// supervise waits for the process, and starts it again whenever it ends without having been stopped.
func (s *supervisor) supervise(c *child, cmd *exec.Cmd, sign string) {
	defer close(c.gone)
	for cmd != nil {
		ended := cmd.Wait()
		if s.stops() {
			return
		}
		fmt.Fprintf(s.out, "%s ended (%v), starting it again\n", c.name, ended)
		time.Sleep(restartPause)
		var err error
		if cmd, err = s.restart(c, sign); err != nil {
			fmt.Fprintln(s.out, err)
			return
		}
	}
}

func (s *supervisor) stops() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping
}

// restart starts a process that has ended; nil without an error: the supervisor has been stopped. stop signals the
// process that it finds, so none is started behind it.
func (s *supervisor) restart(c *child, sign string) (*exec.Cmd, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return nil, nil //nolint:nilnil // as said
	}
	return c.spawn(sign, nil)
}

// stop ends the processes in the reverse order of their start: nodes drain while the leader and the worker are up.
func (s *supervisor) stop(out io.Writer) {
	s.mu.Lock()
	s.stopping = true
	children := s.children
	s.children = nil
	s.mu.Unlock()
	for i := len(children) - 1; i >= 0; i-- {
		children[i].stop(out)
	}
}

func (c *child) stop(out io.Writer) {
	defer c.log.Close()
	c.mu.Lock()
	process := c.process
	c.mu.Unlock()
	_ = process.Signal(syscall.SIGTERM)
	select {
	case <-c.gone:
	case <-time.After(15 * time.Second):
		fmt.Fprintf(out, "%s does not stop, killing it\n", c.name)
		_ = process.Kill()
		<-c.gone
	}
}
