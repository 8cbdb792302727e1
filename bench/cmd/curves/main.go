// Command curves measures how throughput and latency change along axes (backlog, keys, flows, nodes, a held
// transaction ...), prints a table for each and draws it.
//
//	go run ./cmd/curves -short                        few and small points of every axis, about two minutes
//	go run ./cmd/curves -axes backlog,flows -out ../docs/curves
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/penstock/penstock/bench/curves"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "curves:", err)
		stop()
		os.Exit(1)
	}
}

type options struct {
	harness  curves.Harness
	axes     string
	axisTime time.Duration
	out      string
	node     string
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("curves", flag.ContinueOnError)
	f.StringVar(&o.axes, "axes", "all", "which: "+strings.Join(names(curves.Axes()), ", "))
	f.BoolVar(&o.harness.Short, "short", false, "few and small points")
	f.IntVar(&o.harness.Entries, "n", 0, "entries drained at a point, on some axes a few times as many (20,000; 3,000 "+
		"if short)")
	f.DurationVar(&o.harness.PointTime, "point-time", 5*time.Second, "longest drain of a point")
	f.DurationVar(&o.axisTime, "axis-time", 5*time.Minute, "longest time of an axis; points beyond are not run")
	f.DurationVar(&o.harness.HeldFor, "held-for", 0,
		"stretch axis held over this time, with 1,000 entries a second meanwhile; wants a larger -axis-time")
	f.StringVar(&o.out, "out", "", "folder for pictures and points.csv; none if empty")
	f.StringVar(&o.harness.Profile, "profile", "", "folder for profiles of the nodes of axis node")
	f.StringVar(&o.node, "node", "", "internal: be the process of a node with this configuration")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.harness.Entries == 0 {
		o.harness.Entries = 20_000
		if o.harness.Short {
			o.harness.Entries = 3000
		}
	}
	return o, nil
}

func names(axes []curves.Axis) (all []string) {
	for _, a := range axes {
		all = append(all, a.Name)
	}
	return all
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.node != "" {
		return curves.RunNode(ctx, o.node, os.Stdin, os.Stdout)
	}
	axes, err := chosen(o.axes)
	if err != nil {
		return err
	}
	return measure(ctx, o, axes)
}

func chosen(list string) ([]curves.Axis, error) {
	all := curves.Axes()
	if list == "all" {
		return all, nil
	}
	var some []curves.Axis
	for name := range strings.SplitSeq(list, ",") {
		i := slices.Index(names(all), name)
		if i < 0 {
			return nil, fmt.Errorf("no such axis: %q (there are %s)", name, strings.Join(names(all), ", "))
		}
		some = append(some, all[i])
	}
	return some, nil
}

func measure(ctx context.Context, o options, axes []curves.Axis) (err error) {
	harness := o.harness
	source, stop, err := harness.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()

	fmt.Printf("%d CPUs; %s; %d entries a point\n", runtime.NumCPU(), source, harness.Entries)
	var all []curves.Point
	for _, axis := range axes {
		points, axisErr := harness.Measure(ctx, axis, o.axisTime)
		all = append(all, points...)
		err = errors.Join(err, axisErr, curves.WriteTable(os.Stdout, axis, points))
		if o.out != "" {
			err = errors.Join(err, curves.WritePictures(o.out, axis, points))
		}
		if axisErr != nil {
			fmt.Printf("%v\n", axisErr)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if o.out != "" {
		err = errors.Join(err, save(filepath.Join(o.out, "points.csv"),
			func(w io.Writer) error { return curves.WriteCSV(w, all) }))
	}
	return err
}

func save(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("save points: %w", err)
	}
	return errors.Join(write(file), file.Close())
}
