package governor

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"time"

	"github.com/shirou/gopsutil/v3/cpu"
	"github.com/shirou/gopsutil/v3/mem"
)

// Machine measures this process's share of the machine: the innermost limits of its
// cgroups (version 1, 2 or both), else the machine as a whole. It keeps the last CPU
// count to compare with, so one goroutine at a time may use it.
type Machine struct {
	files   fs.FS
	host    host
	started time.Time // any moment: only differences count
	last    cpuCount
}

// host is the machine outside all cgroups.
type host interface {
	memory(ctx context.Context) (memoryUse, error)
	// cpu returns seconds busy and seconds passed, added up over all cores.
	cpu(ctx context.Context) (busy, total float64, err error)
	cores() int
}

// cpuCount is a cumulative counter and the name of its source; two counts of the same source make a
// rate.
type cpuCount struct {
	of          string
	busy, total float64 // seconds; total is in core-seconds
}

// NewMachine reads the cgroup files and the counters of this machine.
func NewMachine() *Machine {
	return &Machine{files: os.DirFS("/"), host: gopsutil{}, started: time.Now()}
}

// Sample measures now. CPU is the average since the last call, 0 in the first.
func (m *Machine) Sample(ctx context.Context) (Measurement, error) {
	memory, err := m.memory(ctx)
	if err != nil {
		return Measurement{}, err
	}
	cores, count, err := m.cpu(ctx)
	if err != nil {
		return Measurement{}, err
	}
	used := 0.0
	if passed := count.total - m.last.total; count.of == m.last.of && passed > 0 {
		used = min(1, max(0, (count.busy-m.last.busy)/passed))
	}
	m.last = count
	return Measurement{
		Cores: cores, CPUUsed: used,
		MemoryLimitBytes: memory.limit, MemoryUsedBytes: memory.used,
	}, nil
}

// memory returns the level with the least free memory: the limit of an ancestor, shared with
// other cgroups, can be nearer than that of the own cgroup.
func (m *Machine) memory(ctx context.Context) (memoryUse, error) {
	least, err := m.host.memory(ctx)
	if err != nil {
		return memoryUse{}, fmt.Errorf("read memory of the machine: %w", err)
	}
	group, err := findController(m.files, "memory")
	if err != nil {
		return memoryUse{}, fmt.Errorf("find memory cgroup: %w", err)
	}
	levels, err := group.memory(m.files)
	if err != nil {
		return memoryUse{}, fmt.Errorf("read memory cgroup: %w", err)
	}
	for _, level := range levels {
		if least.limit <= 0 || level.free() < least.free() {
			least = level
		}
	}
	return least, nil
}

// cpu measures a node with a quota against its quota, and one without against the whole
// machine, whose cores it shares with other processes.
func (m *Machine) cpu(ctx context.Context) (cores float64, count cpuCount, err error) {
	group, err := findController(m.files, "cpu")
	if err != nil {
		return 0, count, fmt.Errorf("find CPU cgroup: %w", err)
	}
	quota, level, err := group.cores(m.files)
	if err != nil {
		return 0, count, fmt.Errorf("read CPU cgroup: %w", err)
	}
	cores = float64(m.host.cores())
	if quota <= 0 || quota >= cores {
		count.of = "machine"
		count.busy, count.total, err = m.host.cpu(ctx)
		if err != nil {
			return 0, count, fmt.Errorf("read CPU of the machine: %w", err)
		}
		return cores, count, nil
	}
	account := group
	if group.version == 1 {
		if account, err = findController(m.files, "cpuacct"); err != nil {
			return 0, count, fmt.Errorf("find CPU accounting cgroup: %w", err)
		}
	}
	if len(account.dirs) == 0 {
		return quota, count, nil
	}
	dir := account.dirs[min(level, len(account.dirs)-1)]
	count = cpuCount{of: dir, total: quota * time.Since(m.started).Seconds()}
	if count.busy, err = account.cpuSeconds(m.files, dir); err != nil {
		return 0, count, fmt.Errorf("read CPU time of cgroup: %w", err)
	}
	return quota, count, nil
}

// gopsutil reads the machine.
type gopsutil struct{}

func (gopsutil) memory(ctx context.Context) (memoryUse, error) {
	v, err := mem.VirtualMemoryWithContext(ctx)
	if err != nil {
		return memoryUse{}, err
	}
	return memoryUse{used: int64(v.Total - v.Available), limit: int64(v.Total)}, nil
}

func (gopsutil) cpu(ctx context.Context) (busy, total float64, err error) {
	all, err := cpu.TimesWithContext(ctx, false)
	if err != nil || len(all) == 0 {
		return 0, 0, err
	}
	t := all[0]
	busy = t.User + t.System + t.Nice + t.Irq + t.Softirq + t.Steal
	return busy, busy + t.Idle + t.Iowait, nil
}

// cores respects the affinity mask, which a cpuset cgroup sets.
func (gopsutil) cores() int { return runtime.NumCPU() }
