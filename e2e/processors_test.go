package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// usage is for how long, until a moment, other processes than this one and its descendants had a processor, on average
// over the processors. Time that a hypervisor withholds is theirs as well.
type usage struct {
	at     time.Time
	others time.Duration
}

const (
	accountPause = 250 * time.Millisecond // between two accounts
	clockTick    = 10 * time.Millisecond  // the unit of times in /proc
)

// account reads the use of the processors until ctx ends, where there is /proc. The programs and the Postgres of a site
// are descendants of this process.
func (m *machine) account(ctx context.Context) {
	first := time.Duration(-1)
	for ctx.Err() == nil {
		at := time.Now()
		busy, err := busyTime()
		if err != nil {
			return
		}
		others := (busy - ownTime()) / time.Duration(runtime.NumCPU())
		if first < 0 {
			first = others
		}
		m.mu.Lock()
		if n := len(m.used); n > 0 { // a process that ended and whose parent is gone is missing from the sum
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

// othersTook is by how much the use by others grew between two moments; an account holds evenly for the time up to the
// next one. Nothing is known of the time before the first and after the last one: there they took nothing.
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

// busyTime is for how long all processors have had something to do since the machine was started.
func busyTime() (time.Duration, error) {
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

// process is what /proc tells of one: its parent, and the time that it and those of its children had that have ended.
type process struct {
	parent int
	had    time.Duration
}

func processes() map[int]process {
	all := map[int]process{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range files {
		text, err := os.ReadFile(name)
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

// descends says that a process is another one or a descendant of it.
func descends(all map[int]process, pid, from int) bool {
	for range len(all) {
		if pid == from {
			return true
		}
		pid = all[pid].parent
	}
	return false
}

// ownTime is for how long this process and its descendants have had a processor.
func ownTime() (sum time.Duration) {
	all := processes()
	for pid, p := range all {
		if descends(all, pid, os.Getpid()) {
			sum += p.had
		}
	}
	return sum
}

// A product that keeps every probe waiting, on a machine that nobody else uses, has its bounds as they are written.
func TestABusyProductDoesNotWidenItsBounds(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	late := []delay{{at(0), at(1000), 900 * time.Millisecond}, {at(1000), at(2000), 900 * time.Millisecond}}
	for _, c := range []struct {
		used []usage
		want int
	}{
		{nil, 0},
		{[]usage{{at(0), 0}, {at(2000), 0}}, 0},
		{[]usage{{at(0), 0}, {at(1000), 0}, {at(2000), 80 * time.Millisecond}}, 40},
		{[]usage{{at(0), 0}, {at(1000), 800 * time.Millisecond}, {at(2000), 1600 * time.Millisecond}}, 800},
		{[]usage{{at(0), 0}, {at(2000), time.Hour}}, 1000},
	} {
		m := &machine{delayed: late, used: c.used}
		if got := m.withheld(at(500), at(1500)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("others took %v: %v withheld, want %d ms", c.used, got, c.want)
		}
	}
}

// What the programs and the database of a site take is not taken by others.
func TestTimeOfDescendantsIsOwnTime(t *testing.T) {
	t.Parallel()
	if _, err := busyTime(); err != nil {
		t.Logf("this machine does not tell: %v; nothing is withheld then", err)
		return
	}
	s := newSite(t, 1)
	all := processes()
	postmaster := s.query(`SELECT split_part(pg_read_file('postmaster.pid'), E'\n', 1)::bigint`)
	for what, pid := range map[string]int{"the leader": s.leaders[0].cmd.Process.Pid, "Postgres": int(postmaster)} {
		if !descends(all, pid, os.Getpid()) {
			t.Errorf("%s, process %d, is no descendant of this process", what, pid)
		}
	}
	before := ownTime()
	burn := exec.CommandContext(t.Context(), "sh", "-c", `i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done`)
	if out, err := burn.CombinedOutput(); err != nil {
		t.Fatal(fmt.Errorf("%w: %s", err, out))
	}
	had := burn.ProcessState.UserTime() + burn.ProcessState.SystemTime()
	if grown := ownTime() - before; grown < had-2*clockTick {
		t.Errorf("a child that has ended had %v, and the time of this process and its descendants grew by %v", had, grown)
	}
}
