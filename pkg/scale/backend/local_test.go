//go:build unix

package backend

import (
	"context"
	"encoding/json"
	"errors"
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

	"github.com/penstock/penstock/pkg/scale"
)

// machine is a directory of local instances; each is a shell that waits for SIGTERM.
type machine struct {
	t   *testing.T
	dir string
}

const waits = `trap 'exit 0' TERM; echo "port ${PORT} gpu ${GPU}"; while :; do sleep 0.01; done`

const leaves = `env -i sleep 1000 & exit 3`

// leader is a new leader of the machine.
func (m machine) leader() *Local {
	m.t.Helper()
	l, err := NewLocal(LocalConfig{Dir: m.dir, Commands: map[string]LocalCommand{
		"waits":   {Command: []string{"sh", "-c", waits}, Endpoint: "http://127.0.0.1:${PORT}/llama", Slots: 2},
		"devices": {Command: []string{"sh", "-c", waits}, Endpoint: "http://127.0.0.1:${PORT}", Devices: []string{"0", "1"}},
		"fails":   {Command: []string{"sh", "-c", "exit 3"}, Endpoint: "http://127.0.0.1:${PORT}"},
		"forks":   {Command: []string{"sh", "-c", "trap '' TERM; sleep 1000 & sleep 1; exit 3"}, Endpoint: "http://127.0.0.1:${PORT}", Devices: []string{"0"}},
		"leaves":  {Command: []string{"sh", "-c", leaves}, Endpoint: "http://127.0.0.1:${PORT}"},
		"keeps":   {Command: []string{"sh", "-c", leaves}, Endpoint: "http://127.0.0.1:${PORT}", Devices: []string{"0"}},
		"absent":  {Command: []string{"/no/such/program"}, Endpoint: "http://127.0.0.1:${PORT}"},
	}})
	if err != nil {
		m.t.Fatal(err)
	}
	l.kept = time.Hour // the machine may stop between two calls for longer than sessionKept
	return l
}

func newMachine(t *testing.T) machine {
	t.Helper()
	m := machine{t, t.TempDir()}
	t.Cleanup(func() {
		l := m.leader()
		l.cfg.Grace = 5 * time.Second
		if err := l.StopAll(t.Context()); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return m
}

func order(command string, count int, remove ...string) scale.Order {
	return scale.Order{
		BackendTarget: scale.BackendTarget{Name: "own", Model: "llama", Target: json.RawMessage(`{"command": "` + command + `"}`)},
		Count:         count, Remove: remove,
	}
}

func (m machine) apply(l *Local, o scale.Order) {
	m.t.Helper()
	if err := l.Apply(m.t.Context(), o); err != nil {
		m.t.Fatal(err)
	}
}

func (m machine) list(l *Local) []scale.BackendInstance {
	m.t.Helper()
	found, err := l.List(m.t.Context(), scale.BackendTarget{Name: "own", Model: "llama"})
	if err != nil {
		m.t.Fatal(err)
	}
	return found
}

// until lists until the condition holds: processes end by themselves.
func (m machine) until(l *Local, holds func([]scale.BackendInstance) bool) []scale.BackendInstance {
	m.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		found := m.list(l)
		if holds(found) {
			return found
		}
		if time.Now().After(end) {
			m.t.Fatalf("still %+v", found)
		}
	}
}

func TestLocalInstancesOutliveTheirLeader(t *testing.T) {
	m := newMachine(t)
	first := m.leader()
	m.apply(first, order("waits", 2))
	m.apply(first, order("waits", 2))
	found := m.list(first)
	if len(found) != 2 || found[0].Endpoint == found[1].Endpoint || found[0].Slots != 2 ||
		!strings.HasPrefix(found[0].Endpoint, "http://127.0.0.1:") || !strings.HasSuffix(found[0].Endpoint, "/llama") {
		t.Fatalf("%+v", found)
	}
	other, err := first.List(t.Context(), scale.BackendTarget{Name: "own", Model: "another"})
	if err != nil || len(other) != 0 {
		t.Errorf("another model has %+v, %v", other, err)
	}
	second := m.leader()
	m.apply(second, order("waits", 2))
	if again := m.list(second); len(again) != 2 || again[0].Name != found[0].Name || again[1].Name != found[1].Name {
		t.Errorf("the next leader has %+v, the first had %+v", again, found)
	}
	m.apply(second, order("waits", 1, found[0].Name))
	left := m.until(second, func(f []scale.BackendInstance) bool { return len(f) == 1 })
	if left[0].Name != found[1].Name || left[0].State != scale.InstanceRunning {
		t.Errorf("%s was to go, %+v is left", found[0].Name, left)
	}
}

func TestAProcessWithoutItsIDInTheRecordIsFound(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	m.apply(l, order("waits", 1))
	name := m.list(l)[0].Name
	path := filepath.Join(m.dir, name+".json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	pid := r.PID
	r.PID, r.Started, r.Boot = 0, 0, "" // a leader died between the start and the second write
	if err := l.write(r); err != nil {
		t.Fatal(err)
	}
	next := m.leader()
	m.apply(next, order("waits", 1))
	if found := m.list(next); len(found) != 1 || found[0].Name != name || found[0].State != scale.InstanceRunning {
		t.Fatalf("%+v", found)
	}
	if state, all, err := next.processes(t.Context(), &r); err != nil || state != alive || r.PID != pid {
		t.Errorf("state %d, %+v, %v: want process %d", state, all, err, pid)
	}
}

func TestADeviceBelongsToOneProcess(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	err := l.Apply(t.Context(), order("devices", 3))
	if err == nil || !strings.Contains(err.Error(), "all 2 devices are in use") {
		t.Errorf("the third: %v", err)
	}
	found := m.list(l)
	if len(found) != 2 {
		t.Fatalf("%+v", found)
	}
	m.apply(l, order("devices", 1, found[0].Name))
	m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 1 })
	m.apply(l, order("devices", 2))
	if found := m.list(l); len(found) != 2 {
		t.Errorf("%+v", found)
	}
}

func TestAStartThatFailsIsReportedAndForgotten(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	m.apply(l, order("fails", 1))
	failed := m.until(l, func(f []scale.BackendInstance) bool {
		return len(f) == 1 && f[0].State == scale.InstanceFailed && strings.Contains(f[0].Message, "exit status 3")
	})
	m.apply(l, order("fails", 0, failed[0].Name))
	if found := m.list(l); len(found) != 0 {
		t.Errorf("%+v", found)
	}
	if err := l.Apply(t.Context(), order("absent", 1)); err == nil {
		t.Error("a program that does not exist: no error")
	}
	if err := l.Apply(t.Context(), order("rm -rf", 2)); err == nil || !strings.Contains(err.Error(), "is not configured here") {
		t.Errorf("a command that is not configured: %v", err)
	}
}

func TestAnInstanceExistsUntilAllOfItsProcessesHaveEnded(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	l.cfg.Grace = time.Millisecond // its child ignores SIGTERM
	m.apply(l, order("forks", 1))
	failed := m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 1 && f[0].State == scale.InstanceFailed })
	if err := l.Apply(t.Context(), order("forks", 2)); err == nil || !strings.Contains(err.Error(), "all 1 devices are in use") {
		t.Errorf("the child has the device still: %v", err)
	}
	m.apply(l, order("forks", 0, failed[0].Name))
	m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 0 })
	all, err := everyProcess(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if mine, err := l.marked(t.Context(), p, failed[0].Name); mine || err != nil {
			t.Errorf("%+v is left: %v", p, err)
		}
	}
}

func TestALaterProcessWithTheSameIDIsNotTheInstance(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	me, found, err := lookUp(t.Context(), os.Getpid())
	if err != nil || !found {
		t.Fatalf("%v, %v", found, err)
	}
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]record{
		"earlier": {PID: me.pid, Started: me.started - 1, Boot: boot},
		"boot":    {PID: me.pid, Started: me.started, Boot: boot + "-before"},
	} {
		r.Name, r.Deployment = name, "own"
		state, all, err := l.processes(t.Context(), &r)
		if name == "boot" && boot == "" {
			continue // this system has no such id
		}
		if err != nil || state != gone {
			t.Errorf("%s: state %d, %+v, %v", name, state, all, err)
		}
	}
}

// A process may end before its record is complete, and leave one that nothing marks: its session has that one.
func TestWhatAProcessThatEndedAtOnceLeavesIsEnded(t *testing.T) {
	const starts = 20
	m := newMachine(t)
	l := m.leader()
	m.apply(l, order("leaves", starts))
	records, err := l.records(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sessions := map[int]bool{}
	for _, r := range records {
		if r.PID == 0 {
			t.Errorf("the record of %s has no process", r.Name)
		}
		sessions[r.PID] = true
	}
	m.until(l, func(f []scale.BackendInstance) bool {
		return len(f) == starts && !slices.ContainsFunc(f, func(i scale.BackendInstance) bool { return i.State != scale.InstanceFailed })
	})
	var names []string
	for _, i := range m.list(l) {
		names = append(names, i.Name)
	}
	m.apply(l, order("leaves", 0, names...))
	m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 0 })
	all, err := everyProcess(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if sessions[p.session] && p.session != 0 && !p.ended {
			t.Errorf("%+v is left", p)
		}
	}
}

// A crash of the machine may leave a record empty or cut off. It stops no deployment, unless a process of its instance runs.
func TestARecordThatCannotBeReadStopsNothing(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	m.apply(l, order("waits", 1))
	found := m.list(l)
	for name, text := range map[string]string{"empty": "", "zeros": "\x00\x00\x00", "cut": `{"name": "cu`, "other": `{}`} {
		if err := os.WriteFile(l.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if again := m.list(m.leader()); len(again) != 1 || again[0].Name != found[0].Name {
		t.Errorf("%+v", again)
	}
	m.apply(m.leader(), order("waits", 2))
	if aside, err := filepath.Glob(filepath.Join(m.dir, "*.json.unreadable")); err != nil || len(aside) != 4 {
		t.Errorf("set aside: %v, %v", aside, err)
	}
	path := l.path(found[0].Name)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text[:len(text)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := m.leader().List(t.Context(), order("waits", 1).BackendTarget); err == nil {
		t.Error("the record of an instance that runs is set aside")
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A leader that sees an instance for the first time, or again after a while, cannot tell what an ended process has left.
func TestADeviceIsNotFreeWhileProcessesMayUseIt(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the sessions of processes are read on Linux only")
	}
	m := newMachine(t)
	m.apply(m.leader(), order("keeps", 1))
	l := m.leader()
	found := m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 1 && f[0].State == scale.InstanceFailed })
	l.kept = 0
	records, err := l.records(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	session := records[0].PID
	ended := false
	end := func() {
		if !ended {
			_ = syscall.Kill(-session, syscall.SIGKILL)
		}
		ended = true
	}
	t.Cleanup(end)
	m.until(l, func(f []scale.BackendInstance) bool {
		return len(f) == 1 && strings.Contains(f[0].Message, "session "+strconv.Itoa(session))
	})
	if err := l.Apply(t.Context(), order("keeps", 2)); err == nil {
		t.Error("an instance was started on the device of one whose processes may run")
	}
	m.apply(l, order("keeps", 0, found[0].Name))
	if f := m.list(l); len(f) != 1 || f[0].State != scale.InstanceEnding {
		t.Errorf("%+v", f)
	}
	end()
	m.until(l, func(f []scale.BackendInstance) bool { return len(f) == 0 })
}

// The id of an instance's first process may be that of a later group or session when all of the instance has ended.
func TestALaterGroupOfTheSameIDIsNotTheInstance(t *testing.T) {
	for name, attributes := range map[string]*syscall.SysProcAttr{"group": {Setpgid: true}, "session": {Setsid: true}} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			l := m.leader()
			leader := exec.CommandContext(t.Context(), "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
			leader.SysProcAttr = attributes
			said, err := leader.Output()
			if err != nil {
				t.Fatal(err)
			}
			member, err := strconv.Atoi(strings.TrimSpace(string(said)))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = syscall.Kill(member, syscall.SIGKILL) })
			boot, err := bootID()
			if err != nil {
				t.Fatal(err)
			}
			if name == "group" {
				l.sees("own-1")
			}
			r := record{Name: "own-1", Deployment: "own", Model: "llama", PID: leader.Process.Pid, Started: 1, Boot: boot}
			if err := l.write(r); err != nil {
				t.Fatal(err)
			}
			if found := m.list(l); len(found) != 1 || found[0].State != scale.InstanceFailed {
				t.Errorf("%+v", found)
			}
			m.apply(l, order("waits", 0, "own-1"))
			if p, found, err := lookUp(t.Context(), member); err != nil || !found || p.ended {
				t.Errorf("a process of another group was ended: %+v, %v, %v", p, found, err)
			}
		})
	}
}

func TestALockedDirectoryIsWaitedForNoLongerThanTheContextLasts(t *testing.T) {
	m := newMachine(t)
	l := m.leader()
	unlock, err := lockDir(t.Context(), m.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.List(ctx, scale.BackendTarget{Name: "own", Model: "llama"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestAnInstanceGetsNoSecretsOfTheLeader(t *testing.T) {
	t.Setenv("PENSTOCK_DATABASE_URL", "postgres://secret")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("LC_ALL", "C")
	t.Setenv("CUDA_HOME", "/cuda")
	env := inherited()
	for _, name := range []string{"PENSTOCK_DATABASE_URL", "AWS_SECRET_ACCESS_KEY"} {
		if slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, name+"=") }) {
			t.Errorf("%s is inherited", name)
		}
	}
	for _, v := range []string{"LC_ALL=C", "CUDA_HOME=/cuda", "PATH=" + os.Getenv("PATH")} {
		if !slices.Contains(env, v) {
			t.Errorf("%s is not inherited", v)
		}
	}
}

func TestCommandsAreCheckedWhenTheyAreRead(t *testing.T) {
	for text, good := range map[string]bool{
		`{"a": {"command": ["x"], "endpoint": "http://127.0.0.1:${PORT}/v1", "slots": 2}}`: true,
		`{"a": {"command": ["x"], "endpoint": "127.0.0.1:${PORT}"}}`:                       false,
		`{"a": {"command": ["x"], "endpoint": "http://user:pass@127.0.0.1:${PORT}"}}`:      false,
		`{"a": {"command": ["x"], "endpoint": "http://127.0.0.1", "gpus": ["0"]}}`:         false,
		`{"a": {"command": [], "endpoint": "http://127.0.0.1"}}`:                           false,
	} {
		path := filepath.Join(t.TempDir(), "commands.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadLocalCommands(path); (err == nil) != good {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestADirectoryMayHaveAnyName(t *testing.T) {
	m := newMachine(t)
	m.dir = filepath.Join(m.dir, "gpu[0]*")
	l := m.leader()
	m.apply(l, order("waits", 1))
	if found := m.list(l); len(found) != 1 {
		t.Errorf("%+v", found)
	}
	if err := l.StopAll(t.Context()); err != nil {
		t.Error(err)
	}
}
