package meter

import (
	"os"
	"strings"
	"syscall"
	"time"
)

// Process is what the calling process used since it started.
type Process struct {
	CPUSeconds  float64
	RSSMaxBytes int64 // the most it ever was
}

// Self reads what this process used.
func Self() Process {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail with these arguments
	p := Process{CPUSeconds: time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()}
	// Not ru_maxrss: that begins with what the process had that started this one.
	text, _ := os.ReadFile("/proc/self/status") // see proc(5); where there is none the memory stays unknown
	for line := range strings.Lines(string(text)) {
		if kilobytes, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			p.RSSMaxBytes = 1024 * int64(number(strings.Fields(kilobytes)[0]))
		}
	}
	return p
}
