package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// process is a program of the product that is killed and started again. Each start is an
// incarnation with a name of its own.
type process struct {
	kind string // leader or tasknode
	name string
	path string
	args func(incarnation, database string) []string
	link *pgproxy.Link
	logs string // directory

	mu          sync.Mutex
	incarnation int
	cmd         *exec.Cmd
	ended       chan struct{}
	deaths      []judge.Death
	stops       []judge.Death // by SIGSTOP, the short ones as well
	drains      []judge.Death
	away        []judge.Death // times for which its connections are cut, slow or muted
	healed      bool          // the faults are over
	starts      int
	otherPath   string          // the same program of another build; empty: there is none
	other       bool            // starts are of the other build
	others      int             // starts of the other build
	failpoints  func() string   // the plan that an incarnation starts with; nil: none
	atFailpoint func(at string) // is told where an incarnation ended itself
}

// database is the address of the process's own way through the proxy.
func (p *process) database() string {
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", superuser, p.link.Address(), databaseName)
}

func (p *process) current() string { return fmt.Sprintf("%s.%d", p.name, p.incarnation) }

// start starts the next incarnation, if none runs.
func (p *process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return nil
	}
	p.incarnation++
	p.starts++
	name := p.current()
	log, err := os.Create(filepath.Join(p.logs, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	path := p.path
	if p.other && p.otherPath != "" {
		path = p.otherPath
		p.others++
	}
	p.cmd = exec.CommandContext(context.Background(), path, p.args(name, p.database())...)
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.logs}
	if p.failpoints != nil {
		p.cmd.Env = append(p.cmd.Env, "FAILPOINTS="+p.failpoints())
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	// The programs end with the harness, whatever ends it: children is a thread that lives as long.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd, ended := p.cmd, make(chan struct{})
	p.ended = ended
	if err := onChildThread(cmd.Start); err != nil {
		p.cmd = nil
		return fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in ProcessState
		at := p.endedAt(name, log.Name())
		close(ended)
		if at != "" {
			p.atFailpoint(at)
		}
	}()
	return nil
}

// running says that the incarnation has not ended. The caller holds mu.
func (p *process) running() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// kill ends the process by SIGKILL at once.
func (p *process) kill() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return false
	}
	p.deaths = append(p.deaths, judge.Death{Process: p.current(), At: time.Now(), Killed: true})
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	return true
}

// kills is how often the process was ended by SIGKILL.
func (p *process) kills() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.deaths {
		if d.Killed {
			n++
		}
	}
	return n
}

// freeze stops the process by SIGSTOP for d. A stop for longer than half a lease counts as a death as well.
func (p *process) freeze(d, lease time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	began := time.Now()
	if !p.running() || p.cmd.Process.Signal(syscall.SIGSTOP) != nil {
		return false
	}
	i := len(p.stops)
	p.stops = append(p.stops, judge.Death{Process: p.current(), At: began, Until: began.Add(d)})
	noted := p.noteStop(-1, p.stops[i], lease)
	stopped := p.cmd.Process
	time.AfterFunc(d, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		_ = stopped.Signal(syscall.SIGCONT)
		if !p.healed { // a busy machine lets it go on late
			p.stops[i].Until = later(p.stops[i].Until, time.Now())
			p.noteStop(noted, p.stops[i], lease)
		}
	})
	return true
}

// noteStop puts a stop for longer than half a lease among the deaths, in the place of the same one if that is 0 or
// more, and returns its place. The caller holds mu.
func (p *process) noteStop(place int, stop judge.Death, lease time.Duration) int {
	switch {
	case place >= 0:
		p.deaths[place] = stop
	case stop.Until.Sub(stop.At) > lease/2:
		place = len(p.deaths)
		p.deaths = append(p.deaths, stop)
	}
	return place
}

// thaw lets a stopped process go on, at the end of the faults.
func (p *process) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.healed = true
	if p.running() {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
	}
	for _, list := range [][]judge.Death{p.deaths, p.stops} {
		for i := range list {
			if now := time.Now(); list[i].Until.After(now) {
				list[i].Until = now
			}
		}
	}
}

// cutOff notes that the process was kept from the database for so long that its lease may have
// lapsed.
func (p *process) cutOff() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaths = append(p.deaths, judge.Death{Process: p.current(), At: time.Now()})
}

// kept notes that the process is kept from the database for a while.
func (p *process) kept(lasts time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.away = append(p.away, judge.Death{Process: p.current(), At: now, Until: now.Add(lasts)})
}

// endMax is how long a process may take to end after SIGTERM.
const endMax = 15 * time.Second

// drain asks the process to end by SIGTERM and waits; one that does not obey is killed.
func (p *process) drain() {
	p.mu.Lock()
	if !p.running() {
		p.mu.Unlock()
		return
	}
	p.drains = append(p.drains, judge.Death{Process: p.current(), At: time.Now()})
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	ended := p.ended
	p.mu.Unlock()
	select {
	case <-ended:
	case <-time.After(endMax):
		p.kill()
		<-ended
	}
}

// change lets the next starts be of the other build, if there is one.
func (p *process) change() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.other = !p.other
}

// up says whether the process runs, and how it ended if it does not.
func (p *process) up() (bool, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return true, ""
	}
	if p.cmd == nil || p.cmd.ProcessState == nil {
		return false, "not started"
	}
	return false, p.cmd.ProcessState.String()
}
