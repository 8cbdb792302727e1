package governor

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

// quiet is a machine of 8 cores and 16 GiB, 4 GiB of them used.
type quiet struct{ busy, total float64 }

func (quiet) memory(context.Context) (memoryUse, error) { return memoryUse{4 * gibi, 16 * gibi}, nil }
func (quiet) cores() int                                { return 8 }
func (q *quiet) cpu(context.Context) (busy, total float64, err error) {
	return q.busy, q.total, nil
}

// tree turns "path: content" blocks into files, so that a recording reads like a terminal.
func tree(t *testing.T, recording string) fstest.MapFS {
	t.Helper()
	files := fstest.MapFS{}
	for block := range strings.SplitSeq(strings.TrimSpace(recording), "\n\n") {
		name, content, ok := strings.Cut(block, "\n")
		if !ok {
			t.Fatalf("recording without content: %q", block)
		}
		files[strings.TrimPrefix(name, "/")] = &fstest.MapFile{Data: []byte(content + "\n")}
	}
	return files
}

// A container on Docker with cgroup v2 and its own namespace: limits stand at the mount point.
const containerV2 = `
/proc/self/cgroup
0::/

/proc/self/mountinfo
1043 1020 0:106 / / rw,relatime master:387 - overlay overlay rw,lowerdir=/var/lib/x
1047 1046 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate

/sys/fs/cgroup/memory.max
536870912

/sys/fs/cgroup/memory.high
max

/sys/fs/cgroup/memory.current
419430400

/sys/fs/cgroup/memory.stat
anon 104857600
file 314572800
inactive_anon 0
inactive_file 209715200

/sys/fs/cgroup/cpu.max
150000 100000

/sys/fs/cgroup/cpu.stat
usage_usec 9000000
user_usec 6000000`

// A service under systemd with cgroup v2: its own limit is wide, that of its slice is closer.
const sliceV2 = `
/proc/self/cgroup
0::/work.slice/node.service

/proc/self/mountinfo
31 23 0:27 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw

/sys/fs/cgroup/work.slice/node.service/memory.max
8589934592

/sys/fs/cgroup/work.slice/node.service/memory.high
max

/sys/fs/cgroup/work.slice/node.service/memory.current
1073741824

/sys/fs/cgroup/work.slice/node.service/memory.stat
inactive_file 0

/sys/fs/cgroup/work.slice/node.service/cpu.max
max 100000

/sys/fs/cgroup/work.slice/memory.max
max

/sys/fs/cgroup/work.slice/memory.high
4294967296

/sys/fs/cgroup/work.slice/memory.current
3221225472

/sys/fs/cgroup/work.slice/memory.stat
inactive_file 1073741824

/sys/fs/cgroup/work.slice/cpu.max
50000 100000

/sys/fs/cgroup/work.slice/cpu.stat
usage_usec 1000000`

// A container with cgroup v1 and no namespace of its own: the paths of the host, mounted at the container's root.
const containerV1 = `
/proc/self/cgroup
12:cpu,cpuacct:/docker/0f3a
7:memory:/docker/0f3a
1:name=systemd:/docker/0f3a

/proc/self/mountinfo
861 858 0:33 /docker/0f3a /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct
866 858 0:38 /docker/0f3a /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory

/sys/fs/cgroup/memory/memory.limit_in_bytes
2147483648

/sys/fs/cgroup/memory/memory.usage_in_bytes
1610612736

/sys/fs/cgroup/memory/memory.stat
cache 805306368
inactive_file 12
total_inactive_file 536870912

/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us
200000

/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us
100000

/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage
3000000000`

// A virtual machine with both versions mounted, controllers in v1, no limits anywhere.
const hybridUnlimited = `
/proc/self/cgroup
4:memory:/process/f4db
2:cpuacct:/
1:cpu:/
0::/

/proc/self/mountinfo
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw

/sys/fs/cgroup/memory/memory.limit_in_bytes
9223372036854771712

/sys/fs/cgroup/memory/process/memory.limit_in_bytes
9223372036854771712

/sys/fs/cgroup/memory/process/f4db/memory.limit_in_bytes
9223372036854771712

/sys/fs/cgroup/memory/process/f4db/memory.usage_in_bytes
3649536

/sys/fs/cgroup/cpu/cpu.cfs_quota_us
-1

/sys/fs/cgroup/cpu/cpu.cfs_period_us
100000`

func TestRecordedCgroups(t *testing.T) {
	tests := []struct {
		name        string
		recording   string
		cores       float64
		used, limit int64
	}{
		{"container, version 2", containerV2, 1.5, 200 << 20, 512 << 20},
		{"slice is the closer limit", sliceV2, 0.5, 2 * gibi, 4 * gibi},
		{"container, version 1", containerV1, 2, gibi, 2 * gibi},
		{"both versions, no limit", hybridUnlimited, 8, 4 * gibi, 16 * gibi},
		{"no cgroups", "/proc/version\nsome other system", 8, 4 * gibi, 16 * gibi},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			m := &Machine{files: tree(t, test.recording), host: &quiet{}}
			s, err := m.Sample(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if s.Cores != test.cores || s.MemoryUsedBytes != test.used || s.MemoryLimitBytes != test.limit {
				t.Errorf("%+v, want cores %g, memory %d of %d", s, test.cores, test.used, test.limit)
			}
		})
	}
}

func TestCPUIsTheRateBetweenTwoSamples(t *testing.T) {
	host := &quiet{busy: 100, total: 1000}
	m := &Machine{files: tree(t, hybridUnlimited), host: host}
	sample := func() float64 {
		s, err := m.Sample(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s.CPUUsed
	}
	if used := sample(); used != 0 {
		t.Errorf("%.2f used in the first sample, want 0", used)
	}
	host.busy, host.total = 106, 1008
	if used := sample(); used != 0.75 {
		t.Errorf("%.2f used, want 0.75", used)
	}
	if used := sample(); used != 0 {
		t.Errorf("%.2f used when no time passed, want 0", used)
	}
}

func TestQuotaRateIsAFractionOfTheQuota(t *testing.T) {
	files := tree(t, containerV2)
	m := &Machine{files: files, host: &quiet{}, started: time.Now()}
	if _, err := m.Sample(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The process used an hour of CPU in no time: all of the quota, not more.
	files["sys/fs/cgroup/cpu.stat"].Data = []byte("usage_usec 3609000000\n")
	s, err := m.Sample(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.CPUUsed != 1 {
		t.Errorf("%.2f used, want 1", s.CPUUsed)
	}
}

func TestUnreadableLimitIsAnError(t *testing.T) {
	files := tree(t, containerV2)
	files["sys/fs/cgroup/memory.max"].Data = []byte("lots\n")
	m := &Machine{files: files, host: &quiet{}}
	if _, err := m.Sample(t.Context()); err == nil || !strings.Contains(err.Error(), "memory.max") {
		t.Errorf("error %v, want one that names memory.max", err)
	}
}

// FuzzCgroup feeds garbage for every file the kernel writes: no panic, no use below
// zero, no path outside the tree.
func FuzzCgroup(f *testing.F) {
	for _, recording := range []string{containerV2, sliceV2, containerV1, hybridUnlimited} {
		files := fstest.MapFS{}
		for block := range strings.SplitSeq(strings.TrimSpace(recording), "\n\n") {
			name, content, _ := strings.Cut(block, "\n")
			files[strings.TrimPrefix(name, "/")] = &fstest.MapFile{Data: []byte(content)}
		}
		f.Add(string(files["proc/self/cgroup"].Data), string(files["proc/self/mountinfo"].Data), "max", "usage_usec 1\ninactive_file 2")
	}
	f.Fuzz(func(t *testing.T, membership, mountinfo, number, stat string) {
		files := &everywhere{membership, mountinfo, number, stat}
		m := &Machine{files: files, host: &quiet{}}
		s, err := m.Sample(t.Context())
		if err == nil && (s.MemoryUsedBytes < 0 || s.Cores <= 0 || s.CPUUsed < 0 || s.CPUUsed > 1) {
			t.Errorf("sample %+v", s)
		}
	})
}

// everywhere has the same content in every cgroup directory.
type everywhere struct{ membership, mountinfo, number, stat string }

func (e *everywhere) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("invalid path")}
	}
	content := e.number
	switch {
	case name == "proc/self/cgroup":
		content = e.membership
	case name == "proc/self/mountinfo":
		content = e.mountinfo
	case strings.HasSuffix(name, ".stat"):
		content = e.stat
	}
	return fstest.MapFS{name: {Data: []byte(content)}}.Open(name)
}

// The machine this runs on has some memory and at least part of a core.
func TestThisMachineIsMeasured(t *testing.T) {
	s, err := NewMachine().Sample(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Cores <= 0 || s.MemoryLimitBytes <= 0 || s.MemoryUsedBytes <= 0 || s.MemoryUsedBytes > s.MemoryLimitBytes {
		t.Errorf("sample %+v", s)
	}
}
