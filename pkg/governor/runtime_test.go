package governor

import (
	"log/slog"
	"runtime/debug"
	"testing"
)

// The runtime stays below the nearest limit of the cgroups, and a limit that a person set stays.
func TestTheRuntimeStaysBelowTheLimitOfTheCgroup(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	for name, c := range map[string]struct {
		recording, environment string
		limit                  int64 // of the cgroup; 0: the runtime keeps what it had
	}{
		"container":           {containerV2, "", 512 << 20},
		"slice":               {sliceV2, "", 4 << 30},
		"container, v1":       {containerV1, "", 2 << 30},
		"no limit":            {hybridUnlimited, "", 0},
		"no cgroups":          {"/proc/version\nsome other system", "", 0},
		"of the environment":  {containerV2, "1GiB", 0},
		"off in environment":  {containerV2, "off", 0},
		"a file that is none": {containerV2 + "\n\n/sys/fs/cgroup/memory.max\nmuch", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("GOMEMLIMIT", c.environment)
			t.Cleanup(func() { debug.SetMemoryLimit(before) })
			limitRuntime(tree(t, c.recording), slog.New(slog.DiscardHandler))
			want := before
			if c.limit > 0 {
				want = int64(0.70 * float64(c.limit))
			}
			if got := debug.SetMemoryLimit(-1); got != want {
				t.Errorf("the runtime is limited to %d bytes, want %d", got, want)
			}
		})
	}
}
