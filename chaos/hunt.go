package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock/penstock/chaos/mutants"
)

// hunted is what became of one mutant.
type hunted struct {
	mutants.Mutant
	by   []string // the promises that it broke, of those that it is meant to break
	also []string // the others, with an example: a finding of the judges that is not about this bug
	took time.Duration
	runs int
}

// Each run of a hunt is short; a mutant that was not caught is tried again with another seed until
// the time is up.
const (
	huntRun = 40 * time.Second
	huntMax = 10 * time.Minute
)

var brokenLine = regexp.MustCompile(`(?m)^BROKEN  ([^:]+): (.*)`)

// hunt builds the programs with one bug after another and runs the harness on each until a promise
// is found broken. It prints a table and returns how many bugs were not found. only limits it to
// mutants whose name contains that.
func hunt(ctx context.Context, seed uint64, only string) (missed int, err error) {
	all, err := mutants.All()
	if err != nil {
		return 0, err
	}
	root, err := filepath.Abs("..")
	if err != nil {
		return 0, err
	}
	var table []hunted
	for _, m := range all {
		if !strings.Contains(m.Name, only) {
			continue
		}
		h := hunted{Mutant: m}
		if err := h.chase(ctx, root, seed); err != nil {
			return 0, err
		}
		fmt.Printf("%s: broken %q after %v\n", m.Name, h.by, h.took.Round(time.Second))
		for _, finding := range h.also {
			fmt.Printf("    beside it: %s\n", finding)
		}
		if len(h.by) == 0 {
			missed++
		}
		table = append(table, h)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "\nmutant\tbug\tfound by\tseconds\truns")
	for _, h := range table {
		fmt.Fprintf(
			w,
			"%s\t%s\t%s\t%.0f\t%d\n",
			h.Name,
			h.Bug,
			strings.Join(h.by, ", "),
			h.took.Seconds(),
			h.runs,
		)
	}
	fmt.Fprintf(w, "\n%d of %d mutants were caught\n", len(table)-missed, len(table))
	return missed, w.Flush()
}

func (h *hunted) chase(ctx context.Context, root string, seed uint64) error {
	dir, err := os.MkdirTemp("", "penstock-mutant-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	overlay, err := h.Apply(ctx, root, dir)
	if err != nil {
		return err
	}
	programs := filepath.Join(dir, "bin")
	if err := os.Mkdir(programs, 0o755); err != nil { //nolint:gosec // programs are executed
		return err
	}
	if err := h.Build(ctx, root, overlay, programs, "./cmd/leader", "./cmd/tasknode"); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for began := time.Now(); len(h.by) == 0 && time.Since(began) < huntMax; h.runs++ {
		run := exec.CommandContext(
			ctx,
			self,
			"-bin",
			programs,
			"-for",
			huntRun.String(),
			"-drain",
			"60s",
			"-seed",
			fmt.Sprint(seed+uint64(h.runs)),
		)
		var out bytes.Buffer
		run.Stdout, run.Stderr = &out, &out
		var exit *exec.ExitError
		if err := run.Run(); err != nil && !errors.As(err, &exit) {
			return err
		}
		h.took = time.Since(began)
		for _, match := range brokenLine.FindAllStringSubmatch(out.String(), -1) {
			switch promise := match[1]; {
			case !slices.Contains(h.Breaks, promise):
				h.also = append(h.also, promise+": "+match[2])
			case !slices.Contains(h.by, promise):
				h.by = append(h.by, promise)
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}
