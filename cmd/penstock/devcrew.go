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

// crew is the processes that `penstock dev` looks after. One that dies is started again.
type crew struct {
	logs string
	out  io.Writer
	env  []string

	mu       sync.Mutex
	members  []*member
	stopping bool
}

// member is one process and its successors.
type member struct {
	name, path string
	args, env  []string
	log        *os.File

	mu      sync.Mutex
	process *os.Process
	gone    chan struct{} // closed when it has ended for good
}

func newCrew(logs string, out io.Writer) (*crew, error) {
	for _, name := range []string{"leader", "tasknode", "gateway", "worker"} {
		if _, err := beside(name); err != nil {
			return nil, err
		}
	}
	return &crew{logs: logs, out: out}, nil
}

// patience is how long a program may take until it says that it serves.
const patience = 30 * time.Second

// start runs the program that the name begins with ("tasknode-2" is a tasknode), and returns the word that follows
// sign in what it says first.
func (c *crew) start(ctx context.Context, name, sign string, args ...string) (string, error) {
	program, _, _ := strings.Cut(name, "-")
	path, err := beside(program)
	if err != nil {
		return "", err
	}
	log, err := os.Create(filepath.Join(c.logs, name+".log")) //nolint:gosec // a name of ours in a directory of ours
	if err != nil {
		return "", fmt.Errorf("make log: %w", err)
	}
	m := &member{name: name, path: path, args: args, env: c.env, log: log, gone: make(chan struct{})}
	said := make(chan string, 1)
	first, err := m.spawn(sign, said)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	c.members = append(c.members, m)
	c.mu.Unlock()
	go c.keep(m, first, sign)
	select {
	case word := <-said:
		m.pin(word)
		return word, nil
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(patience):
		return "", fmt.Errorf("%s did not say %q within %s; see %s", name, sign, patience, log.Name())
	}
}

// pin makes successors listen where the first one did.
func (m *member) pin(address string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, arg := range m.args {
		if arg == "127.0.0.1:0" {
			m.args[i] = strings.TrimPrefix(address, "http://")
		}
	}
}

func (m *member) spawn(sign string, said chan<- string) (*exec.Cmd, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	cmd := exec.Command(m.path, m.args...) //nolint:gosec,noctx // a program of ours, which stop ends
	cmd.Env = append(os.Environ(), m.env...)
	cmd.SysProcAttr = endsWithParent()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", m.name, err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", m.name, err)
	}
	m.process = cmd.Process
	go m.record(r, sign, said)
	return cmd, nil
}

// record copies what the process says to its log, and passes on the first word after sign.
func (m *member) record(r *os.File, sign string, said chan<- string) {
	defer r.Close()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		fmt.Fprintln(m.log, line)
		if _, rest, found := strings.Cut(line, sign); found && said != nil {
			word, _, _ := strings.Cut(rest, " ")
			said <- word
			said = nil
		}
	}
}

// restartPause is how long a process that has ended stays away.
const restartPause = 500 * time.Millisecond

// keep waits for the process, and starts it again whenever it ends without having been stopped.
func (c *crew) keep(m *member, cmd *exec.Cmd, sign string) {
	defer close(m.gone)
	for cmd != nil {
		ended := cmd.Wait()
		if c.stops() {
			return
		}
		fmt.Fprintf(c.out, "%s ended (%v), starting it again\n", m.name, ended)
		time.Sleep(restartPause)
		var err error
		if cmd, err = c.again(m, sign); err != nil {
			fmt.Fprintln(c.out, err)
			return
		}
	}
}

func (c *crew) stops() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stopping
}

// again starts a process that has ended; nil without an error: the crew has been stopped. stop signals the process that
// it finds, so none is started behind it.
func (c *crew) again(m *member, sign string) (*exec.Cmd, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopping {
		return nil, nil //nolint:nilnil // as said
	}
	return m.spawn(sign, nil)
}

// stop ends the processes in the reverse order of their start: nodes drain while the leader and the worker are up.
func (c *crew) stop(out io.Writer) {
	c.mu.Lock()
	c.stopping = true
	members := c.members
	c.members = nil
	c.mu.Unlock()
	for i := len(members) - 1; i >= 0; i-- {
		members[i].stop(out)
	}
}

func (m *member) stop(out io.Writer) {
	defer m.log.Close()
	m.mu.Lock()
	process := m.process
	m.mu.Unlock()
	_ = process.Signal(syscall.SIGTERM)
	select {
	case <-m.gone:
	case <-time.After(15 * time.Second):
		fmt.Fprintf(out, "%s does not stop, killing it\n", m.name)
		_ = process.Kill()
		<-m.gone
	}
}
