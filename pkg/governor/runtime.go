package governor

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"runtime/debug"
)

// runtimeShare is the part of a memory limit that Go's runtime may take. It is below the marks of the governor, which
// counts garbage as used: at 0.8 it lets queues in again that it refused. The rest is for what the runtime does not
// count: the program's own pages, buffers of the kernel, and what is allocated while a collection runs.
const runtimeShare = 0.70

// LimitRuntime keeps the memory of Go's runtime below the limit of this process's cgroup, where there is one: the
// closer it comes, the more often garbage is collected. Without it the heap doubles between two collections, or grows
// fivefold in programs that say so, whatever the limit, and the kernel kills the process. A limit from the environment
// (GOMEMLIMIT) stays.
func LimitRuntime(log *slog.Logger) { limitRuntime(os.DirFS("/"), log) }

func limitRuntime(files fs.FS, log *slog.Logger) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	limit, err := memoryLimit(files)
	switch {
	case err != nil:
		log.Warn("the runtime knows no limit of memory", "error", err)
	case limit > 0:
		share := int64(runtimeShare * float64(limit))
		debug.SetMemoryLimit(share)
		log.Debug("limited the memory of the runtime", "bytes", share, "cgroup", limit)
	}
}

// memoryLimit returns the smallest memory limit in bytes of the cgroups of this process, 0 if none has one.
func memoryLimit(files fs.FS) (least int64, err error) {
	group, err := findController(files, "memory")
	if err != nil {
		return 0, fmt.Errorf("find memory cgroup: %w", err)
	}
	levels, err := group.memory(files)
	if err != nil {
		return 0, fmt.Errorf("read memory cgroup: %w", err)
	}
	for _, level := range levels {
		if least == 0 || level.limit < least {
			least = level.limit
		}
	}
	return least, nil
}
