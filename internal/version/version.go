// Package version says what a program was built from.
package version

import (
	"cmp"
	"runtime/debug"
	"strings"
)

// Set by the linker in releases and images, whose builds do not see a repository (deploy/release.sh, Dockerfile).
var release, commit string

// Build is what a program was built from.
type Build struct {
	Version string // of the module; "(devel)" or "unknown" where the build recorded none
	Commit  string // empty where the build recorded none
}

// Read returns what the linker, or else the go command, recorded of this program.
func Read() Build {
	b := Build{Version: "unknown"}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.Version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				b.Commit = s.Value
			}
		}
	}
	return Build{cmp.Or(release, b.Version), cmp.Or(commit, b.Commit)}
}

// Released returns the version, empty for a build without one.
func (b Build) Released() string {
	if b.Version == "(devel)" || b.Version == "unknown" {
		return ""
	}
	return b.Version
}

// String is the version, or the commit where there is none.
func (b Build) String() string {
	return cmp.Or(b.Released(), strings.TrimSpace("dev "+b.Commit[:min(12, len(b.Commit))]))
}
