package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// programsOfTheHarness are the packages of the programs that it starts.
var programsOfTheHarness = []string{"./cmd/leader", "./cmd/tasknode", "./cmd/gateway"}

// finding is a broken promise in the output of a run, with an example.
type finding struct{ promise, example string }

// runOnce runs the harness on programs, for huntRun and with these flags, and returns what it found.
func runOnce(ctx context.Context, programs string, flags []string) (found []finding, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := append([]string{"-bin", programs, "-for", huntRun.String(), "-drain", "60s"}, flags...)
	run := exec.CommandContext(ctx, self, args...)
	var out bytes.Buffer
	run.Stdout, run.Stderr = &out, &out
	var exit *exec.ExitError
	err = run.Run()
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil && !errors.As(err, &exit):
		return nil, err
	case err != nil && exit.ExitCode() != 1:
		fmt.Printf("a run was not judged: %v: %s\n", err, lastLine(out.String()))
	}
	for _, match := range brokenLine.FindAllStringSubmatch(out.String(), -1) {
		found = append(found, finding{match[1], match[2]})
	}
	return found, nil
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// control is the programs without a bug. They are built once, and run once with each set of flags.
type control struct {
	root, dir string
	broke     map[string][]string // promises, by flags
}

// breaks returns the promises that a run with these flags breaks.
func (c *control) breaks(ctx context.Context, flags []string) ([]string, error) {
	key := strings.Join(flags, " ")
	if broke, known := c.broke[key]; known {
		return broke, nil
	}
	if err := c.build(ctx); err != nil {
		return nil, err
	}
	found, err := runOnce(ctx, c.dir, flags)
	if err != nil {
		return nil, err
	}
	var broke []string
	for _, f := range found {
		if !slices.Contains(broke, f.promise) {
			broke = append(broke, f.promise)
		}
	}
	fmt.Printf("without a bug, %s: broken %q\n", key, broke)
	c.broke[key] = broke
	return broke, nil
}

func (c *control) build(ctx context.Context) (err error) {
	if c.dir != "" {
		return nil
	}
	if c.dir, err = os.MkdirTemp("", "penstock-control-"); err != nil {
		return err
	}
	if err := os.Chmod(c.dir, 0o755); err != nil { //nolint:gosec // programs are executed
		return err
	}
	build := exec.CommandContext(ctx, "go", append([]string{"build", "-o", c.dir + string(filepath.Separator)},
		programsOfTheHarness...)...)
	build.Dir = c.root
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the programs without a bug: %w\n%s", err, text)
	}
	return nil
}

func (c *control) remove() { os.RemoveAll(c.dir) }
