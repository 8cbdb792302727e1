package main

import (
	"errors"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/version"
	"github.com/penstock/penstock/migrations"
)

// built is what this program was built from.
type built struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Go      string `json:"go"`
	Schema  string `json:"schema"` // newest migration
	Digest  string `json:"digest"` // of all migrations: equal for programs of one schema
}

func versionCommand(a *app) *cobra.Command {
	c := &cobra.Command{Use: "version", Short: "Version and commit of this program", Args: cobra.NoArgs}
	c.RunE = func(*cobra.Command, []string) error {
		v, err := readBuild()
		if err != nil {
			return err
		}
		return printOne(a, v, func(w io.Writer) {
			a.facts(w, "penstock", v.Version, "commit", v.Commit, "go", v.Go, "schema", v.Schema, "digest", v.Digest)
		})
	}
	return c
}

func readBuild() (built, error) {
	b := version.Read()
	v := built{Version: b.Version, Commit: b.Commit, Go: runtime.Version()}
	known, err := migrations.Names()
	if err != nil {
		return v, err
	}
	if len(known) == 0 {
		return v, errors.New("read migrations: there are none in this program")
	}
	v.Schema = known[len(known)-1].Name
	v.Digest, err = migrations.Digest()
	return v, err
}
