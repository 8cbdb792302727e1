//go:build linux

package governor

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	limitBytes = 256 << 20
	limitedEnv = "PENSTOCK_TEST_LIMITED_CGROUP"
)

// TestGovernorUnderRealMemoryLimit runs this test binary again inside a memory cgroup of
// 256 MiB and watches the gate close before the kernel kills, and open again.
func TestGovernorUnderRealMemoryLimit(t *testing.T) {
	dir := limitedCgroup(t)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInsideMemoryLimit$", "-test.v")
	child.Env = append(os.Environ(), limitedEnv+"="+dir)
	output, err := child.CombinedOutput()
	if err != nil || !strings.Contains(string(output), "--- PASS: TestInsideMemoryLimit") {
		t.Fatalf("inside the cgroup: %v\n%s", err, output)
	}
	t.Logf("inside the cgroup:\n%s", output)
}

// TestInsideMemoryLimit is the other half of TestGovernorUnderRealMemoryLimit and does nothing on its own.
func TestInsideMemoryLimit(t *testing.T) {
	dir := os.Getenv(limitedEnv)
	if dir == "" {
		t.Skip("runs only inside the cgroup that TestGovernorUnderRealMemoryLimit makes")
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		t.Fatal(err)
	}
	g, err := New(Config{Calm: time.Millisecond}, NewMachine(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	before := ""
	ask := func(moment string) Admission {
		if err := g.read(t.Context()); err != nil {
			t.Fatal(err)
		}
		v := g.Ask("video", 4)
		news := fmt.Sprint(moment, codes(v))
		if news == before {
			return v
		}
		before = news
		r := g.Status().Readings
		fmt.Printf("%s: %d of %d MiB used, allow %d %v\n", moment, r.MemoryUsedBytes>>20, r.MemoryLimitBytes>>20, v.Allow, v.Reasons)
		return v
	}
	if err := g.Declare("video", Need{MemoryBytes: 100 << 20}); err != nil {
		t.Fatal(err)
	}
	if v := ask("at first"); v.Allow != 1 && v.Allow != 2 {
		t.Errorf("allow %d entries of 100 MiB in 256 MiB", v.Allow)
	}
	if limit := g.Status().Readings.MemoryLimitBytes; limit != limitBytes {
		t.Fatalf("limit %d, want %d", limit, limitBytes)
	}
	if full := fill(t, ask); full.Allow != 0 || full.Reasons[0].Code != MemoryHigh {
		t.Errorf("nearly full: verdict %+v, want a refusal for %s", full, MemoryHigh)
	}
	ask("released")
	time.Sleep(2 * time.Millisecond) // the calm time of this test's config
	ask("calm")
	if gate := g.Status().State.Memory; gate.Closed {
		t.Errorf("calm: gate %+v, want it open", gate)
	}
}

// fill uses memory until the gate closes or the limit is reached, in small steps, and releases it. The memory is the
// kernel's and not Go's: under the race detector that would cost several times its size, and more when it is freed.
func fill(t *testing.T, ask func(string) Admission) Admission {
	const step = 4 << 20
	full := Admission{Allow: 1}
	for used := 0; used < limitBytes && (full.Allow > 0 || full.Reasons[0].Code != MemoryHigh); used += step {
		memory, err := syscall.Mmap(-1, 0, step, syscall.PROT_READ|syscall.PROT_WRITE,
			syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_POPULATE)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := syscall.Munmap(memory); err != nil {
				t.Error(err)
			}
		}()
		full = ask("filling")
	}
	return full
}

// limitedCgroup makes a memory cgroup below our own, or skips where this machine does not allow one.
func limitedCgroup(t *testing.T) string {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a memory cgroup")
	}
	own, err := findController(os.DirFS("/"), "memory")
	if err != nil {
		t.Fatal(err)
	}
	if own.version == 0 {
		t.Skip("needs a memory cgroup controller; none is mounted")
	}
	parent := "/" + own.dirs[0]
	dir := filepath.Join(parent, fmt.Sprintf("penstock-test-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("needs a writable cgroup file system: %v", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Errorf("remove test cgroup: %v", err)
		}
	})
	limit := filepath.Join(dir, map[int]string{1: "memory.limit_in_bytes", 2: "memory.max"}[own.version])
	if _, err := os.Stat(limit); errors.Is(err, fs.ErrNotExist) {
		t.Skipf("needs the memory controller enabled for children of %s (cgroup.subtree_control)", parent)
	}
	if err := os.WriteFile(limit, []byte(strconv.Itoa(limitBytes)), 0); err != nil {
		t.Skipf("needs permission to limit memory: %v", err)
	}
	return dir
}
