package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	mutants.Mutant `json:"-"`

	Of      string    `json:"mutant"` // its name
	By      []string  `json:"by"`     // the promises that it broke, of those that it is meant to break
	Also    []string  `json:"also"`   // the others, with an example: a finding of the judges that is not about this bug
	Seconds float64   `json:"seconds"`
	Runs    int       `json:"runs"`
	Seed    uint64    `json:"seed"`
	Commit  string    `json:"commit"` // of the repository, without the bug
	At      time.Time `json:"at"`
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
// mutants whose name contains one of its words. results is a file to which each result is added at once: mutants that
// were found at the same commit are not hunted again; empty for none.
func hunt(ctx context.Context, seed uint64, only, results string) (missed int, err error) {
	root, err := filepath.Abs("..")
	if err != nil {
		return 0, err
	}
	commit, err := exec.CommandContext(ctx, "git", "-C", root, "describe", "--always", "--dirty").Output()
	if err != nil {
		return 0, fmt.Errorf("name the commit: %w", err)
	}
	table, err := readResults(results)
	if err != nil {
		return 0, err
	}
	at := strings.TrimSpace(string(commit))
	table = foundAt(at, only, table)
	left, err := toHunt(only, table)
	if err != nil {
		return 0, err
	}
	without := &control{root: root, broke: map[string][]string{}}
	defer without.remove()
	for _, m := range left {
		h := hunted{Mutant: m, Of: m.Name, Seed: seed, Commit: at, At: time.Now().UTC()}
		if err := h.chase(ctx, root, seed, without); err != nil {
			return 0, err
		}
		fmt.Printf("%s: broken %q after %.0fs\n", m.Name, h.By, h.Seconds)
		for _, finding := range h.Also {
			fmt.Printf("    beside it: %s\n", finding)
		}
		if err := addResult(results, h); err != nil {
			return 0, err
		}
		table = append(table, h)
	}
	return printHunted(os.Stdout, table)
}

// foundAt are the results of a commit that need not be had again: a mutant that was missed is hunted once more. Of a
// tree with changes, whose commit does not say what was built, there are none.
func foundAt(commit, only string, table []hunted) []hunted {
	return slices.DeleteFunc(table, func(h hunted) bool {
		return h.Commit != commit || strings.HasSuffix(commit, "-dirty") || len(h.By) == 0 || !named(h.Of, only)
	})
}

// toHunt are the mutants of which there is no result. Those come last whose bug loses entries: the harness waits
// minutes for these before it reports them.
func toHunt(only string, known []hunted) ([]mutants.Mutant, error) {
	all, err := mutants.All()
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(m mutants.Mutant) bool {
		return !named(m.Name, only) ||
			slices.ContainsFunc(known, func(h hunted) bool { return h.Of == m.Name })
	})
	waits := func(m mutants.Mutant) int {
		if slices.Contains(m.Breaks, "an accepted entry has an outcome") {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b mutants.Mutant) int { return waits(a) - waits(b) })
	return all, nil
}

// named reports whether the name contains one of the words of only, which commas separate; empty is contained in all.
func named(name, only string) bool {
	return slices.ContainsFunc(strings.Split(only, ","), func(word string) bool { return strings.Contains(name, word) })
}

func readResults(name string) (table []hunted, err error) {
	text, err := os.ReadFile(name)
	if name == "" || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := mutants.All()
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		var h hunted
		if err := json.Unmarshal(line, &h); err != nil {
			return nil, fmt.Errorf("read results of %s: %w", name, err)
		}
		for _, m := range all {
			if m.Name == h.Of {
				h.Mutant = m
			}
		}
		table = append(table, h)
	}
	return table, nil
}

func addResult(name string, h hunted) error {
	if name == "" {
		return nil
	}
	line, err := json.Marshal(h)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

func printHunted(out io.Writer, table []hunted) (missed int, err error) {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "\nmutant\tbug\tfound by\tseconds\truns\tseed\tcommit\tbegun")
	for _, h := range table {
		if len(h.By) == 0 {
			missed++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.0f\t%d\t%d\t%s\t%s\n", h.Of, h.Bug, strings.Join(h.By, ", "), h.Seconds, h.Runs,
			h.Seed, h.Commit, h.At.Format(time.DateTime))
	}
	fmt.Fprintf(w, "\n%d of %d mutants were caught\n", len(table)-missed, len(table))
	return missed, w.Flush()
}

// chase builds the programs with the bug and runs the harness on them until one of its promises is found broken. A
// promise that the programs without a bug break as well, in a run with the same seed and flags, is not found by that
// run.
func (h *hunted) chase(ctx context.Context, root string, seed uint64, without *control) error {
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
	if err := h.Build(ctx, root, overlay, programs, programsOfTheHarness...); err != nil {
		return err
	}
	for began := time.Now(); len(h.By) == 0 && time.Since(began) < huntMax; h.Runs++ {
		args := append([]string{"-seed", fmt.Sprint(seed + uint64(h.Runs))}, h.With...)
		found, err := runOnce(ctx, programs, args)
		if err != nil {
			return err
		}
		h.Seconds = time.Since(began).Seconds()
		if err := h.judge(found, func() ([]string, error) { return without.breaks(ctx, args) }); err != nil {
			return err
		}
	}
	return nil
}

// judge takes the findings of a run: those of promises that the bug is meant to break count unless the run without the
// bug had them.
func (h *hunted) judge(found []finding, without func() ([]string, error)) error {
	var by []string
	for _, f := range found {
		switch {
		case !slices.Contains(h.Breaks, f.promise):
			h.Also = append(h.Also, f.promise+": "+f.example)
		case !slices.Contains(by, f.promise):
			by = append(by, f.promise)
		}
	}
	if len(by) == 0 {
		return nil
	}
	broke, err := without()
	if err != nil {
		return err
	}
	for _, promise := range by {
		if slices.Contains(broke, promise) {
			h.Also = append(h.Also, promise+": broken without the bug as well")
		} else {
			h.By = append(h.By, promise)
		}
	}
	return nil
}
