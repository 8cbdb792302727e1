package backend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// bootID tells one start of the system from the next: ids and times of processes begin again with it.
var bootID = sync.OnceValues(func() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the id of the boot: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
})

// lookUp reads /proc/PID/stat, see proc(5). Its field 22 is the start in clock ticks after the boot: a number that
// the kernel keeps, and not one that is computed from a clock that may be set.
func lookUp(_ context.Context, pid int) (running, bool, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if isGone(err) {
		return running{}, false, nil
	}
	if err != nil {
		return running{}, false, err
	}
	// The name of the program is in parentheses, and may contain anything.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	const state, group, session, start = 0, 2, 3, 19 // fields 3, 5, 6 and 22
	if len(fields) <= start {
		return running{}, false, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields)+2)
	}
	p := running{pid: pid, ended: bytes.ContainsAny(fields[state], "ZXx")}
	if p.group, err = strconv.Atoi(string(fields[group])); err != nil {
		return running{}, false, fmt.Errorf("/proc/%d/stat: process group: %w", pid, err)
	}
	if p.session, err = strconv.Atoi(string(fields[session])); err != nil {
		return running{}, false, fmt.Errorf("/proc/%d/stat: session: %w", pid, err)
	}
	if p.started, err = strconv.ParseUint(string(fields[start]), 10, 64); err != nil {
		return running{}, false, fmt.Errorf("/proc/%d/stat: start: %w", pid, err)
	}
	return p, true, nil
}

func everyProcess(ctx context.Context) ([]running, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []running
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		p, found, err := lookUp(ctx, pid)
		if err != nil {
			return nil, err
		}
		if found {
			all = append(all, p)
		}
	}
	return all, nil
}

// environment is that of a process at its start; none for a process of another user, which is no instance.
func environment(_ context.Context, pid int) ([]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if isGone(err) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return strings.Split(string(text), "\x00"), nil
}

func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }
