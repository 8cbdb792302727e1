package machine

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// usage is for how long, until a moment, other processes than those of a test had a processor, on
// average over the processors. Other tests are others; so is a hypervisor that withholds time.
type usage struct {
	at     time.Time
	others time.Duration
}

const (
	accountPause = 250 * time.Millisecond // between two accounts
	clockTick    = 10 * time.Millisecond  // the unit of times in /proc
)

// account reads the use of the processors until ctx ends, where there is /proc.
func (m *Machine) account(ctx context.Context, own *Consumers) {
	first := time.Duration(-1)
	for ctx.Err() == nil {
		at := time.Now()
		busy, err := BusyTime()
		if err != nil {
			return
		}
		others := (busy - own.Time()) / time.Duration(runtime.NumCPU())
		if first < 0 {
			first = others
		}
		m.mu.Lock()
		if n := len(m.used); n > 0 { // the sums are not of one moment
			others = max(others, first+m.used[n-1].others)
		}
		m.used = append(m.used, usage{at, others - first})
		m.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(accountPause):
		}
	}
}

// othersTook is by how much the use by others grew between two moments; an account holds evenly
// for the time up to the next one. Nothing is known of the time before the first and after the
// last one: there they took nothing.
func othersTook(used []usage, from, to time.Time) time.Duration {
	until := func(at time.Time) time.Duration {
		next := slices.IndexFunc(used, func(u usage) bool { return !u.at.Before(at) })
		switch {
		case len(used) == 0 || next == 0:
			return 0
		case next < 0:
			return used[len(used)-1].others
		}
		a, b := used[next-1], used[next]
		return a.others + time.Duration(float64(b.others-a.others)*float64(at.Sub(a.at))/float64(b.at.Sub(a.at)))
	}
	return until(to) - until(from)
}

// BusyTime is for how long all processors have had something to do since the machine was started.
func BusyTime() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	var ticks int64
	for i, field := range strings.Fields(string(line)) {
		n, _ := strconv.ParseInt(field, 10, 64)
		if i >= 1 && i <= 8 && i != 4 && i != 5 { // neither idle nor waiting for a disk; guests are within user
			ticks += n
		}
	}
	return time.Duration(ticks) * clockTick, nil
}

// process is what /proc tells of one: its parent, and the time that it and those of its children
// had that have ended.
type process struct {
	parent int
	had    time.Duration
}

func processes() map[int]process {
	all := map[int]process{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range files {
		text, err := os.ReadFile(name) //nolint:gosec // of /proc
		if err != nil {
			continue // it has ended
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		_, rest, _ := strings.Cut(string(text[bytes.LastIndexByte(text, ')'):]), " ")
		fields := strings.Fields(rest) // from the state on, which is the third
		if len(fields) < 15 {
			continue
		}
		one := process{}
		one.parent, _ = strconv.Atoi(fields[1])
		for _, field := range fields[11:15] {
			ticks, _ := strconv.ParseInt(field, 10, 64)
			one.had += time.Duration(ticks) * clockTick
		}
		all[pid] = one
	}
	return all
}

// descends says that a process is one of some others or a descendant of one.
func descends(all map[int]process, pid int, from map[int]bool) bool {
	for range len(all) {
		if from[pid] {
			return true
		}
		pid = all[pid].parent
	}
	return false
}

// Consumers are the processes of a test: programs with their descendants, and a Postgres, whose
// working directory is that of its data.
type Consumers struct {
	directory string
	programs  func() (running []int, ended time.Duration)

	postmaster    string        // the first line of its file: the process id
	ended, server time.Duration // what servers before this one had, and what this one had last
}

// Of returns the processes of a test: those that programs returns, with what those had that have
// ended, and the Postgres with the data directory, unless it is empty.
func Of(directory string, programs func() (running []int, ended time.Duration)) *Consumers {
	return &Consumers{directory: directory, programs: programs}
}

// Time is for how long they have had a processor.
func (c *Consumers) Time() time.Duration {
	all := processes()
	running, sum := c.programs()
	roots := map[int]bool{}
	for _, pid := range running {
		roots[pid] = true
	}
	server := time.Duration(0)
	for pid, p := range all {
		if c.serves(pid) {
			server += p.had
		} else if descends(all, pid, roots) {
			sum += p.had
		}
	}
	text, _ := os.ReadFile(filepath.Join(c.directory, "postmaster.pid"))
	if postmaster, _, _ := strings.Cut(string(text), "\n"); postmaster != "" && postmaster != c.postmaster {
		c.postmaster, c.ended, c.server = postmaster, c.ended+c.server, 0
	}
	c.server = max(c.server, server)
	return sum + c.ended + c.server
}

// serves says whether a process belongs to the Postgres.
func (c *Consumers) serves(pid int) bool {
	directory, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	return err == nil && c.directory != "" && directory == c.directory
}
