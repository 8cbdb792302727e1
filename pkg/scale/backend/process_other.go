//go:build !linux

package backend

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/shirou/gopsutil/v3/process"
)

// bootID is the same at all times: the time at which a process was created tells boots apart.
func bootID() (string, error) { return "", nil }

func lookUp(ctx context.Context, pid int) (running, bool, error) {
	p, err := process.NewProcessWithContext(ctx, int32(pid)) //nolint:gosec // ids of processes are that small
	if errors.Is(err, process.ErrorProcessNotRunning) {
		return running{}, false, nil
	}
	if err != nil {
		return running{}, false, fmt.Errorf("read process %d: %w", pid, err)
	}
	return describe(ctx, p)
}

func describe(ctx context.Context, p *process.Process) (running, bool, error) {
	created, err := p.CreateTimeWithContext(ctx)
	if err != nil {
		return absentIfGone(ctx, p, err)
	}
	status, err := p.StatusWithContext(ctx)
	if err != nil {
		return absentIfGone(ctx, p, err)
	}
	return running{
		pid: int(p.Pid), started: uint64(max(created, 0)), ended: slices.Contains(status, process.Zombie),
	}, true, nil
}

// absentIfGone tells a process that ended while it was read from one that cannot be read.
func absentIfGone(ctx context.Context, p *process.Process, cause error) (running, bool, error) {
	exists, err := process.PidExistsWithContext(ctx, p.Pid)
	if err == nil && !exists {
		return running{}, false, nil
	}
	return running{}, false, errors.Join(cause, err)
}

func everyProcess(ctx context.Context) ([]running, error) {
	found, err := process.ProcessesWithContext(ctx)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var all []running
	for _, p := range found {
		if r, exists, err := describe(ctx, p); err == nil && exists { // those of others cannot be read
			all = append(all, r)
		}
	}
	return all, nil
}

func environment(ctx context.Context, pid int) ([]string, error) {
	p, err := process.NewProcessWithContext(ctx, int32(pid)) //nolint:gosec // ids of processes are that small
	if err != nil {
		return nil, nil //nolint:nilerr // it ended just now
	}
	env, err := p.EnvironWithContext(ctx)
	if err != nil {
		return nil, nil //nolint:nilerr // of another user
	}
	return env, nil
}
