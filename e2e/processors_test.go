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
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
)

// usage is for how long, until a moment, other processes than the programs and the Postgres of a site had a processor, on
// average over the processors. Other tests and their sites are others; so is a hypervisor that withholds time.
type usage struct {
	at     time.Time
	others time.Duration
}

const (
	accountPause = 250 * time.Millisecond // between two accounts
	clockTick    = 10 * time.Millisecond  // the unit of times in /proc
)

// account reads the use of the processors until ctx ends, where there is /proc.
func (m *machine) account(ctx context.Context, own *consumers) {
	first := time.Duration(-1)
	for ctx.Err() == nil {
		at := time.Now()
		busy, err := busyTime()
		if err != nil {
			return
		}
		others := (busy - own.time()) / time.Duration(runtime.NumCPU())
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

// consumers are the processes of one site: the programs that its test started with their descendants, and those of its
// Postgres, whose working directory is that of its data.
type consumers struct {
	test      string // the name of the test
	directory string

	postmaster    string        // the first line of its file: the process id
	ended, server time.Duration // what servers before this one had, and what this one had last
}

// consumers returns the processes of the site of a test.
func (s *site) consumers() *consumers {
	s.t.Helper()
	c := &consumers{test: testOf(s.t)}
	if err := s.pool.QueryRow(s.t.Context(), `SHOW data_directory`).Scan(&c.directory); err != nil {
		s.t.Fatal(err)
	}
	return c
}

// time is for how long they have had a processor.
func (c *consumers) time() time.Duration {
	all := processes()
	roots := map[int]bool{}
	sum := time.Duration(0)
	for _, p := range programsOf(c.test) {
		select {
		case <-p.ended:
			sum += p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
		default:
			roots[p.cmd.Process.Pid] = true
		}
	}
	server := time.Duration(0)
	for pid, p := range all {
		if directory, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err == nil && directory == c.directory {
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

// What the programs and the database of a site take is not taken by others, and what other tests take is.
func TestTimeOfASiteIsThatOfItsProgramsAndItsPostgres(t *testing.T) {
	t.Parallel()
	if _, err := busyTime(); err != nil {
		t.Logf("this machine does not tell: %v; nothing is withheld then", err)
		return
	}
	s := newSite(t, 0) // no leader takes time meanwhile
	own := s.consumers()
	burn := exec.CommandContext(t.Context(), "sh", "-c", `i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done`)
	before := own.time()
	s.query(`SELECT count(*) FROM generate_series(1, 3000000)`)
	byServer := own.time()
	if byServer-before < 5*clockTick {
		t.Errorf("three million rows of the site's Postgres took %v of the site's time", byServer-before)
	}
	if out, err := burn.CombinedOutput(); err != nil {
		t.Fatal(fmt.Errorf("%w: %s", err, out))
	}
	had := burn.ProcessState.UserTime() + burn.ProcessState.SystemTime()
	if grown := own.time() - byServer; grown >= had {
		t.Errorf("a process of the test had %v, and the time of the site grew by %v", had, grown)
	}
	leader := s.startLeader("leader_a")
	leader.signal(syscall.SIGKILL)
	<-leader.ended
	left := own.time()
	if had := leader.cmd.ProcessState.UserTime() + leader.cmd.ProcessState.SystemTime(); had < clockTick || left < had {
		t.Errorf("the killed leader had %v, the site %v", had, left)
	}
	s.server.Restart(devpostgres.Immediate)
	if after := own.time(); after < left {
		t.Errorf("the site had %v, and %v after a restart of its Postgres", left, after)
	}
}
