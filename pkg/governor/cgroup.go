package governor

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
)

// controller holds the cgroup directories of one resource of this process: its own cgroup
// and every visible ancestor, innermost first. A limit on any of them applies.
type controller struct {
	version int // 1 or 2, 0 if there is none
	dirs    []string
}

// mount is one line of /proc/self/mountinfo that mounts a cgroup hierarchy.
type mount struct {
	root, point string
	version     int
	controllers []string // of version 1
}

// findController finds the cgroup of the process for "memory", "cpu" or "cpuacct". A version 1
// hierarchy with that controller wins, as the kernel binds a controller to one hierarchy only.
func findController(fsys fs.FS, name string) (controller, error) {
	mountinfo, err := fs.ReadFile(fsys, "proc/self/mountinfo")
	if err != nil {
		return controller{}, ignoreMissing(err)
	}
	membership, err := fs.ReadFile(fsys, "proc/self/cgroup")
	if err != nil {
		return controller{}, ignoreMissing(err)
	}
	groups := parseMembership(string(membership))
	var found controller
	for _, m := range parseMounts(string(mountinfo)) {
		key := ""
		if m.version == 1 {
			key = name
		}
		group, member := groups[key]
		if !member || m.version == 1 && !slices.Contains(m.controllers, name) {
			continue
		}
		if found.version == 0 || m.version == 1 {
			found = controller{m.version, m.chain(group)}
		}
	}
	return found, nil
}

// parseMounts reads the lines "id parent dev root point options ... - type source superoptions".
func parseMounts(mountinfo string) []mount {
	var mounts []mount
	for line := range strings.Lines(mountinfo) {
		front, back, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(front), strings.Fields(back)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		m := mount{root: unescape(left[3]), point: unescape(left[4])}
		switch right[0] {
		case "cgroup2":
			m.version = 2
		case "cgroup":
			m.version, m.controllers = 1, strings.Split(right[2], ",")
		default:
			continue
		}
		mounts = append(mounts, m)
	}
	return mounts
}

// unescape undoes the octal escapes of blanks in mount paths.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// parseMembership reads the lines "id:controllers:path"; version 2 has no controllers.
func parseMembership(membership string) map[string]string {
	groups := map[string]string{}
	for line := range strings.Lines(membership) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for name := range strings.SplitSeq(parts[1], ",") {
			groups[name] = parts[2]
		}
	}
	return groups
}

// chain lists the directories from the group up to the mount point. In a container the
// group's path may be outside the mount: then the mount point is the group itself.
func (m mount) chain(group string) []string {
	below, inside := strings.CutPrefix(path.Clean("/"+group), strings.TrimSuffix(path.Clean("/"+m.root), "/"))
	if !inside || below != "" && below[0] != '/' {
		below = "/"
	}
	point := strings.TrimPrefix(path.Clean("/"+m.point), "/")
	var dirs []string
	for below = path.Clean("/" + below); ; below = path.Dir(below) {
		dirs = append(dirs, path.Join(point, below))
		if below == "/" {
			return dirs
		}
	}
}

// memoryUse is use and limit in bytes of one level.
type memoryUse struct{ used, limit int64 }

func (m memoryUse) free() int64 { return m.limit - m.used }

// memoryFiles names the files of a cgroup version: limits, use, and the key of droppable cache in memory.stat.
func (c controller) memoryFiles() (limits []string, current, inactive string) {
	if c.version == 1 {
		return []string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"
	}
	// Above memory.high the kernel stalls the group, so it is a limit like memory.max.
	return []string{"memory.max", "memory.high"}, "memory.current", "inactive_file"
}

// memory returns every level that has a limit. Page cache that the kernel would drop
// first (inactive files) is not counted as used.
func (c controller) memory(fsys fs.FS) ([]memoryUse, error) {
	limits, current, inactive := c.memoryFiles()
	var levels []memoryUse
	for _, dir := range c.dirs {
		limit := int64(unlimited)
		for _, name := range limits {
			value, err := readNumber(fsys, path.Join(dir, name))
			if err != nil {
				return nil, err
			}
			limit = min(limit, value)
		}
		// Version 1 writes "no limit" as the largest multiple of the page size.
		if limit >= unlimited>>1 {
			continue
		}
		used, err := memoryUsed(fsys, dir, current, inactive)
		if err != nil {
			return nil, err
		}
		levels = append(levels, memoryUse{used, limit})
	}
	return levels, nil
}

func memoryUsed(fsys fs.FS, dir, current, inactive string) (int64, error) {
	used, err := readNumber(fsys, path.Join(dir, current))
	if err != nil || used == unlimited {
		return 0, err
	}
	stat, err := fs.ReadFile(fsys, path.Join(dir, "memory.stat"))
	if err != nil {
		return 0, ignoreMissing(err)
	}
	return max(0, used-statValue(string(stat), inactive)), nil
}

// cores returns the smallest CPU quota over all levels, in cores, and its directory's index
// in dirs; 0 if there is none.
func (c controller) cores(fsys fs.FS) (cores float64, level int, err error) {
	for i, dir := range c.dirs {
		quota, period, err := c.quota(fsys, dir)
		if err != nil {
			return 0, 0, err
		}
		if quota <= 0 || quota == unlimited || period <= 0 || period == unlimited {
			continue
		}
		if n := float64(quota) / float64(period); cores == 0 || n < cores {
			cores, level = n, i
		}
	}
	return cores, level, nil
}

// quota returns microseconds of CPU per period of microseconds.
func (c controller) quota(fsys fs.FS, dir string) (quota, period int64, err error) {
	if c.version == 1 {
		quota, err = readNumber(fsys, path.Join(dir, "cpu.cfs_quota_us"))
		if err != nil {
			return 0, 0, err
		}
		period, err = readNumber(fsys, path.Join(dir, "cpu.cfs_period_us"))
		return quota, period, err
	}
	text, err := fs.ReadFile(fsys, path.Join(dir, "cpu.max"))
	if err != nil {
		return 0, 0, ignoreMissing(err)
	}
	fields := strings.Fields(string(text))
	if len(fields) != 2 {
		return 0, 0, fmt.Errorf("read %s/cpu.max: %q is not a quota and a period", dir, text)
	}
	if quota, err = parseNumber(fields[0]); err == nil {
		period, err = parseNumber(fields[1])
	}
	return quota, period, err
}

// cpuSeconds returns the CPU time a directory has used so far.
func (c controller) cpuSeconds(fsys fs.FS, dir string) (float64, error) {
	if c.version == 1 {
		nanoseconds, err := readNumber(fsys, path.Join(dir, "cpuacct.usage"))
		return float64(nanoseconds) / 1e9, err
	}
	stat, err := fs.ReadFile(fsys, path.Join(dir, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	return float64(statValue(string(stat), "usage_usec")) / 1e6, nil
}

// unlimited is the value of "max" and of a missing file, as in the root cgroup.
const unlimited = math.MaxInt64

func readNumber(fsys fs.FS, name string) (int64, error) {
	text, err := fs.ReadFile(fsys, name)
	if err != nil {
		return unlimited, ignoreMissing(err)
	}
	n, err := parseNumber(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", name, err)
	}
	return n, nil
}

func parseNumber(s string) (int64, error) {
	if s == "max" {
		return unlimited, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if errors.Is(err, strconv.ErrRange) && n > 0 {
		return unlimited, nil // version 1 on some kernels counts beyond int64
	}
	return n, err
}

// statValue returns the value of a key in a file of lines "key value"; 0 if the key is missing.
func statValue(stat, key string) int64 {
	for line := range strings.Lines(stat) {
		if value, ok := strings.CutPrefix(line, key+" "); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			return max(0, n)
		}
	}
	return 0
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
