// Package child starts the processes in which a benchmark runs what it measures, and talks with them by lines.
//
// Both sides write one line for each message. A process says that it is ready, waits for a line to begin, and reports
// by lines of JSON. The package of each benchmark has the messages.
package child

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// Process is a process that was started. Its error output is that of this program.
type Process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// Start starts a program with its arguments. The end of ctx kills it.
func Start(ctx context.Context, args []string) (*Process, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // the benchmark's own programs
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", args[0], err)
	}
	return &Process{cmd: cmd, in: in, out: bufio.NewReaderSize(out, 1<<20)}, nil
}

// Ready waits for the first line, by which a process says that it is ready.
func (p *Process) Ready() error {
	if _, err := p.out.ReadString('\n'); err != nil {
		return fmt.Errorf("wait until ready: %w", err)
	}
	return nil
}

// Tell sends a line. A process that has ended shows that by its output, so that an error of the pipe says nothing new.
func (p *Process) Tell(line string) { _, _ = fmt.Fprintln(p.in, line) }

// Read decodes the next line, which is JSON.
func (p *Process) Read(into any) error {
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("wait for a report: %w", err)
	}
	if err := json.Unmarshal(line, into); err != nil {
		return fmt.Errorf("read a report: %w", err)
	}
	return nil
}

// EndInput closes the input of the process, and so asks it to end.
func (p *Process) EndInput() { _ = p.in.Close() }

// Kill ends the process at once; Wait says how it ended.
func (p *Process) Kill() { _ = p.cmd.Process.Kill() }

// Wait waits until the process has ended, and returns an error unless its status is 0.
func (p *Process) Wait() error { return p.cmd.Wait() }
