package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/penstock/penstock/examples/worker/sample"
)

// samples writes real inputs: as JSON lines to stdout, or as files into a folder.
func samples(args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("worker samples", flag.ContinueOnError)
	asLines := flags.Bool("jsonl", false, "write lines {\"model\", \"payload\"} to standard output (the default "+
		"without --out)")
	folder := flags.String("out", "", "write pictures, texts and samples.jsonl into this `folder`")
	count := flags.Int("count", 24, "how many inputs")
	expected := flags.Bool("expected", false, "add to each line what its result must contain")
	if err := flags.Parse(args); err != nil {
		return ignoreHelp(err)
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case *count < 0:
		return fmt.Errorf("--count must not be negative, is %d", *count)
	}
	if *asLines || *folder == "" {
		if err := sample.Write(stdout, *count, *expected); err != nil {
			return err
		}
	}
	if *folder != "" {
		return writeFolder(*folder, *count, *expected)
	}
	return nil
}

func writeFolder(folder string, count int, expected bool) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("create sample folder: %w", err)
	}
	calls, err := sample.Calls(count)
	if err != nil {
		return err
	}
	for i, call := range calls {
		name, content := fmt.Sprintf("%03d.txt", i), []byte(fmt.Sprint(call.Payload["text"], "\n"))
		if picture, ok := call.Payload["image"].([]byte); ok {
			name, content = fmt.Sprintf("%03d.jpg", i), picture
		}
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o644); err != nil {
			return fmt.Errorf("write sample: %w", err)
		}
	}
	lines, err := os.Create(filepath.Join(folder, "samples.jsonl"))
	if err != nil {
		return fmt.Errorf("create samples.jsonl: %w", err)
	}
	return errors.Join(sample.Write(lines, count, expected), lines.Close())
}
