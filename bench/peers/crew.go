package peers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
)

// crew is the processes of a contender that do one step together.
type crew struct {
	members []*member
	mu      sync.Mutex
	ended   bool // all entries are handled, and the members know it
}

// member is one process of a crew; child.go has what it says.
type member struct {
	cmd      *exec.Cmd
	in       io.WriteCloser
	out      *bufio.Reader
	progress Progress
	report   Report
}

// startCrew starts n processes for a step, and waits until they are ready. Of the entries each has a share.
func startCrew(ctx context.Context, contender Command, dsn string, step Step, n int) (*crew, error) {
	c := &crew{}
	all := step.Entries
	step.Shared = n > 1
	for i := range n {
		step.Entries = all*(i+1)/n - all*i/n
		m, err := startMember(ctx, contender.Args(dsn, step))
		if err != nil {
			return c, err
		}
		c.members = append(c.members, m)
		if i == 0 { // it migrates, which the others would do at the same time
			if err := m.ready(); err != nil {
				return c, err
			}
		}
	}
	for _, m := range c.members[1:] {
		if err := m.ready(); err != nil {
			return c, err
		}
	}
	return c, nil
}

func startMember(ctx context.Context, args []string) (m *member, err error) {
	m = &member{cmd: exec.CommandContext(ctx, args[0], args[1:]...), progress: Progress{Expected: -1}}
	m.cmd.Stderr = os.Stderr
	if m.in, err = m.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	m.out = bufio.NewReaderSize(out, 1<<20)
	if err := m.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", args[0], err)
	}
	return m, nil
}

// ready waits until the process is.
func (m *member) ready() error {
	if _, err := m.out.ReadString('\n'); err != nil {
		return fmt.Errorf("wait until ready: %w", err)
	}
	return nil
}

// work tells all to begin, and returns what they report together.
func (c *crew) work() (Report, error) {
	c.tell("go")
	errs := make([]error, len(c.members))
	var group sync.WaitGroup
	for i, m := range c.members {
		group.Go(func() {
			if errs[i] = c.listen(m); errs[i] != nil {
				c.kill() // the others would wait for what this one had taken
			}
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return Report{}, err
	}
	var sum Report
	for _, m := range c.members {
		sum.add(m.report)
	}
	return sum, nil
}

func (c *crew) kill() {
	for _, m := range c.members {
		_ = m.cmd.Process.Kill()
	}
}

func (c *crew) tell(word string) {
	for _, m := range c.members {
		fmt.Fprintln(m.in, word) // one that has ended says so by its output
	}
}

// listen reads what a process says until its report.
func (c *crew) listen(m *member) error {
	for {
		line, err := m.out.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("wait for the report, told of %d entries handled: %w", m.progress.Handled, err)
		}
		var said struct {
			Report
			Progress *Progress `json:"progress"`
		}
		if err := json.Unmarshal(line, &said); err != nil {
			return fmt.Errorf("read the report: %w", err)
		}
		if said.Progress == nil {
			m.report = said.Report
			return nil
		}
		c.note(m, *said.Progress)
	}
}

// note keeps the progress of a process, and ends the step when nothing is left to handle.
func (c *crew) note(m *member, now Progress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.progress = now
	left := int64(0)
	for _, m := range c.members {
		if m.progress.Expected < 0 {
			return
		}
		left += m.progress.Expected - m.progress.Handled
	}
	if left <= 0 && !c.ended {
		c.ended = true
		c.tell("stop")
	}
}

// wait waits until the processes have ended.
func (c *crew) wait() error {
	var errs []error
	for _, m := range c.members {
		errs = append(errs, m.cmd.Wait())
	}
	return errors.Join(errs...)
}

// add adds what another process of the same step reports. They worked at the same time.
func (r *Report) add(other Report) {
	r.Entries += other.Entries
	r.Seconds = max(r.Seconds, other.Seconds)
	r.LatencyMicros = append(r.LatencyMicros, other.LatencyMicros...)
	r.FromPushMicros = append(r.FromPushMicros, other.FromPushMicros...)
	r.ClientCPUSeconds += other.ClientCPUSeconds
	r.ClientRSSBytes += other.ClientRSSBytes
	r.Unsupported = r.Unsupported || other.Unsupported
}
