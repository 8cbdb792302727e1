// Package mutants holds patches that each put one bug into the product, and builds the programs
// with one of them. The fault harness has to find each of these bugs: a judge that finds none of
// them would find none in the product either.
package mutants

import (
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

//go:embed *.patch
var patches embed.FS

// Mutant is a bug. Its patch begins with a line that describes it, one that names the promises that it breaks, and,
// where the usual faults do not reach it, one with flags of the harness.
type Mutant struct {
	Name, Bug string
	Breaks    []string // one of them has to be found broken
	With      []string // flags
	patch     []byte
}

// All returns the mutants by name.
func All() ([]Mutant, error) {
	files, err := patches.ReadDir(".")
	if err != nil {
		return nil, err
	}
	all := make([]Mutant, 0, len(files))
	for _, f := range files {
		text, err := patches.ReadFile(f.Name())
		if err != nil {
			return nil, err
		}
		bug, rest, _ := strings.Cut(string(text), "\n")
		breaks, rest, _ := strings.Cut(rest, "\n")
		with, _, _ := strings.Cut(rest, "\n")
		m := Mutant{Name: strings.TrimSuffix(f.Name(), ".patch"), Bug: bug, patch: text}
		if promises, named := strings.CutPrefix(breaks, "breaks: "); named {
			m.Breaks = strings.Split(promises, ", ")
		}
		if flags, named := strings.CutPrefix(with, "with: "); named {
			m.With = strings.Fields(flags)
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b Mutant) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

var patchedFile = regexp.MustCompile(`(?m)^\+\+\+ b/(\S+)`)

// Files are those that the patch changes, relative to the root of the repository.
func (m Mutant) Files() []string {
	var names []string
	for _, match := range patchedFile.FindAllSubmatch(m.patch, -1) {
		names = append(names, string(match[1]))
	}
	return names
}

// Apply copies the files of the patch from the repository at root to dir, patches the copies, and
// returns the name of an overlay for `go build -overlay`, by which the copies stand in for the
// originals. The repository is not changed.
func (m Mutant) Apply(ctx context.Context, root, dir string) (overlay string, err error) {
	replaced := map[string]string{}
	for _, name := range m.Files() {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return "", fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		copied := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(copied), 0o755); err != nil { //nolint:gosec // a tree of sources
			return "", err
		}
		if err := os.WriteFile(copied, text, 0o600); err != nil {
			return "", err
		}
		replaced[filepath.Join(root, name)] = copied
	}
	apply := exec.CommandContext(ctx, "git", "apply", "-")
	apply.Dir = dir
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir))
	apply.Stdin = strings.NewReader(string(m.patch))
	if out, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mutant %s no longer applies, write it anew: %w\n%s", m.Name, err, out)
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": replaced})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o600)
}

// Build builds the given packages of the repository with the bug; out is a directory, or empty to
// build nothing but objects.
func (m Mutant) Build(ctx context.Context, root, overlay, out string, packages ...string) error {
	args := []string{"build", "-overlay", overlay}
	if out != "" {
		args = append(args, "-o", out+string(filepath.Separator))
	}
	build := exec.CommandContext(ctx, "go", append(args, packages...)...)
	build.Dir = root
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("mutant %s does not build: %w\n%s", m.Name, err, text)
	}
	return nil
}
