package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/migrations"
)

// Set by the linker in releases and images, whose builds do not see a repository (deploy/release.sh, Dockerfile).
var releaseVersion, releaseCommit string

// version is what this program was built from.
type version struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Go      string `json:"go"`
	Schema  string `json:"schema"` // newest migration
	Digest  string `json:"digest"` // of all migrations: equal for programs of one schema
}

func versionCommand(a *app) *cobra.Command {
	c := &cobra.Command{Use: "version", Short: "Version and commit of this program", Args: cobra.NoArgs}
	c.RunE = func(*cobra.Command, []string) error {
		v, err := built()
		if err != nil {
			return err
		}
		return printOne(a, v, func(w io.Writer) {
			a.facts(w, [2]string{"penstock", v.Version}, [2]string{"commit", v.Commit}, [2]string{"go", v.Go},
				[2]string{"schema", v.Schema}, [2]string{"digest", v.Digest})
		})
	}
	return c
}

func built() (version, error) {
	v := version{Version: "unknown", Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	v.Version, v.Commit = cmp.Or(releaseVersion, v.Version), cmp.Or(releaseCommit, v.Commit)
	known, err := migrations.Names()
	if err != nil {
		return v, err
	}
	if len(known) == 0 {
		return v, fmt.Errorf("read migrations: there are none in this program")
	}
	v.Schema = known[len(known)-1].Name
	v.Digest, err = migrations.Digest()
	return v, err
}
