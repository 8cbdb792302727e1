package peers

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock/penstock/bench/child"
)

// processes are those of a contender that do one step together.
type processes struct {
	all   []*process
	mu    sync.Mutex
	ended bool // all entries are handled, and the processes know it
}

// process is one of them; child.go has the messages.
type process struct {
	*child.Process
	progress Progress
	report   Report
}

// startProcesses starts n processes for a step, and waits until they are ready. Of the entries each has a share.
func startProcesses(ctx context.Context, contender Command, dsn string, step Step, n int) (*processes, error) {
	s := &processes{}
	all := step.Entries
	step.Shared = n > 1
	for i := range n {
		step.Entries = all*(i+1)/n - all*i/n
		p, err := child.Start(ctx, contender.Args(dsn, step))
		if err != nil {
			return s, err
		}
		s.all = append(s.all, &process{Process: p, progress: Progress{Expected: -1}})
		if i == 0 { // it migrates, which the others would do at the same time
			if err := p.Ready(); err != nil {
				return s, err
			}
		}
	}
	for _, p := range s.all[1:] {
		if err := p.Ready(); err != nil {
			return s, err
		}
	}
	return s, nil
}

// work tells all to begin, and returns what they report together.
func (s *processes) work() (Report, error) {
	s.tell("go")
	errs := make([]error, len(s.all))
	var group sync.WaitGroup
	for i, p := range s.all {
		group.Go(func() {
			if errs[i] = s.listen(p); errs[i] != nil {
				s.kill() // the others would wait for what this one had taken
			}
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return Report{}, err
	}
	var sum Report
	for _, p := range s.all {
		sum.add(p.report)
	}
	return sum, nil
}

func (s *processes) kill() {
	for _, p := range s.all {
		p.Kill()
	}
}

func (s *processes) tell(line string) {
	for _, p := range s.all {
		p.Tell(line)
	}
}

// listen reads the messages of a process until its report.
func (s *processes) listen(p *process) error {
	for {
		var message struct {
			Report
			Progress *Progress `json:"progress"`
		}
		if err := p.Read(&message); err != nil {
			return fmt.Errorf("%w, after %d entries were handled", err, p.progress.Handled)
		}
		if message.Progress == nil {
			p.report = message.Report
			return nil
		}
		s.note(p, *message.Progress)
	}
}

// note keeps the progress of a process, and ends the step when nothing is left to handle.
func (s *processes) note(p *process, now Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.progress = now
	left := int64(0)
	for _, p := range s.all {
		if p.progress.Expected < 0 {
			return
		}
		left += p.progress.Expected - p.progress.Handled
	}
	if left <= 0 && !s.ended {
		s.ended = true
		s.tell("stop")
	}
}

// wait waits until the processes have ended.
func (s *processes) wait() error {
	var errs []error
	for _, p := range s.all {
		errs = append(errs, p.Wait())
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
