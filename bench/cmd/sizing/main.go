// Command sizing says how many cores and how much WAL a load takes, by a model that is fitted to measured points,
// and shows how far the model is from points that it was not fitted to.
//
//	go run ./cmd/sizing                                             fit, and the error at every point
//	go run ./cmd/sizing -rate 5000 -push-batch 1 -payload 1000      what 5,000 entries a second take
//	go run ./cmd/sizing -measure                                    measure the points anew on this machine
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/penstock/penstock/bench/curves"
	"github.com/penstock/penstock/bench/sizing"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "sizing:", err)
		stop()
		os.Exit(1)
	}
}

type options struct {
	harness     curves.Harness
	file        string
	measure     bool
	rounds      int
	cores       int
	rate        float64
	batch       int
	shape       sizing.Shape
	utilization float64
	node        string
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("sizing", flag.ContinueOnError)
	f.StringVar(&o.file, "points", "../docs/curves/sizing.csv", "file of the measured points")
	f.BoolVar(&o.measure, "measure", false, "measure the points anew and write the file")
	f.IntVar(&o.rounds, "rounds", 3, "how often each point is measured")
	f.IntVar(&o.harness.Entries, "n", 20_000, "entries of a measurement, times 2 or 3")
	f.DurationVar(&o.harness.PointTime, "point-time", 10*time.Second,
		"longest drain, and the length of a sustained load")
	f.IntVar(&o.cores, "cores", runtime.NumCPU(), "cores of the machine that the points were measured on")
	f.Float64Var(&o.rate, "rate", 0, "entries a second that are wanted")
	f.IntVar(&o.batch, "push-batch", 1, "entries that are pushed at once")
	f.IntVar(&o.shape.Group, "group", 1, "entries that share a lock key and wait together")
	f.IntVar(&o.shape.PayloadBytes, "payload", 200, "bytes of JSON in an entry")
	f.Float64Var(&o.utilization, "utilization", 0.6, "share of the database's cores that may be busy")
	f.StringVar(&o.node, "node", "", "internal: be the process of a node with this configuration")
	return o, f.Parse(args)
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.node != "" {
		return curves.RunNode(ctx, o.node, os.Stdin, os.Stdout)
	}
	if o.measure {
		if err := measure(ctx, o); err != nil {
			return err
		}
	}
	file, err := os.Open(o.file)
	if err != nil {
		return fmt.Errorf("open points: %w: -measure makes them", err)
	}
	defer file.Close()
	points, err := sizing.ReadPoints(file)
	if err != nil {
		return err
	}
	model, err := sizing.Fit(points)
	if err != nil {
		return err
	}
	if o.rate > 0 {
		return size(os.Stdout, model, o)
	}
	return errors.Join(show(os.Stdout, model), check(os.Stdout, model, points, o.cores),
		capacity(os.Stdout, model, o.utilization))
}

func measure(ctx context.Context, o options) (err error) {
	harness := o.harness
	_, stop, err := harness.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	points, err := harness.SizingPoints(ctx, max(1, o.rounds))
	if err != nil {
		return err
	}
	file, err := os.Create(o.file)
	if err != nil {
		return fmt.Errorf("save points: %w", err)
	}
	return errors.Join(sizing.WritePoints(file, points), file.Close())
}

// show prints the coefficients.
func show(w io.Writer, model sizing.Model) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "an entry costs\ta commit\ta lock\titself\ta KB of payload\ta chunk\ta key\t")
	for _, step := range []sizing.Step{sizing.Push, sizing.Work} {
		m := model[step]
		for _, row := range []struct {
			name string
			c    [6]float64
		}{{"server us", m.Server}, {"client us", m.Client}, {"WAL B", m.WAL}} {
			fmt.Fprintf(tw, "%s, %s\t", step, row.name)
			for _, c := range row.c {
				fmt.Fprintf(tw, "%.1f\t", c)
			}
			fmt.Fprintln(tw)
		}
	}
	return tw.Flush()
}

// check prints how far the model is from every point; those that it was not fitted to are the ones that count.
func check(w io.Writer, model sizing.Model, points []sizing.Point, cores int) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\npoint\tserver us\tmodel\t\tclient us\tmodel\t\tWAL B\tmodel\t\tentries/s\tmodel\t\t")
	var errs []float64
	for _, p := range points {
		kind := "fitted"
		if p.Check {
			kind = "check"
		}
		m := model.Predict(p)
		name := fmt.Sprintf("%s %s, batch %d, group %d, %d B, %.2g commits", kind, p.Step, p.PushBatch, p.Group,
			p.PayloadBytes, p.Commits+p.PushCommits)
		if p.ServerCores > 0 {
			name += fmt.Sprintf(", server on %d of %d cores", p.ServerCores, cores)
		}
		fmt.Fprint(tw, name, "\t")
		pairs := [][2]float64{
			{p.ServerMicros, m.ServerMicros},
			{p.ClientMicros, m.ClientMicros},
			{p.WALBytes, m.WALBytes},
		}
		if p.Commits+p.PushCommits < 0.05 { // else it waits for commits, or for handlers that sleep
			pairs = append(pairs, [2]float64{p.Rate, m.Rate(cores, p.ServerCores)})
		}
		for _, pair := range pairs {
			fmt.Fprintf(tw, "%.1f\t%.1f\t%+.0f%%\t", pair[0], pair[1], 100*(pair[1]/pair[0]-1))
		}
		fmt.Fprintln(tw)
		if p.Check {
			errs = append(errs, math.Abs(m.ServerMicros/p.ServerMicros-1))
		}
	}
	if err := tw.Flush(); err != nil || len(errs) == 0 {
		return err
	}
	slices.Sort(errs)
	_, err := fmt.Fprintf(w, "\n"+
		"server CPU at the %d points that were not fitted: median error %.0f%%, largest %.0f%%\n"+
		"The rate is what all cores of the machine would do if nothing but CPU held it up; no rate is given for "+
		"loads that wait for commits or handlers.\n",
		len(errs), 100*errs[len(errs)/2], 100*errs[len(errs)-1])
	return err
}

// capacity prints what databases carry by the model. Nothing beyond the cores of the measured machine was seen.
func capacity(w io.Writer, model sizing.Model, utilization float64) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(tw, "\nentries/s at a utilization of %g, pushed and worked off, by cores of the "+
		"database\t2\t4\t8\t16\t\n", utilization)
	for _, load := range []struct {
		name         string
		batch, group int
		payloadBytes int
	}{
		{"solo, 200 B, pushed one by one", 1, 1, 200},
		{"solo, 200 B, pushed by 100", 100, 1, 200},
		{"solo, 1,500 B, pushed by 100", 100, 1, 1500},
		{"groups of 50, 200 B, pushed by 100", 100, 50, 200},
	} {
		push := sizing.Shape{Commits: 1 / float64(load.batch), Group: load.group, PayloadBytes: load.payloadBytes}
		work := push
		work.Commits = busyCommits
		cost := model.Cost(sizing.Push, push).Plus(model.Cost(sizing.Work, work))
		fmt.Fprint(tw, load.name, "\t")
		for _, cores := range []float64{2, 4, 8, 16} {
			fmt.Fprintf(tw, "%.0f\t", cost.Capacity(cores, utilization))
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// Transactions that working off an entry takes: its share when a node is busy, and all of them when it comes alone.
const busyCommits, aloneCommits = 0.02, 4

// aloneRateMax is how many entries a second may come one by one into an idle queue; beyond, they meet.
const aloneRateMax = 1000

// size prints what a load takes: when endings and claims share transactions, as they do under load, and,
// at low rates, when every entry comes alone.
func size(w io.Writer, model sizing.Model, o options) error {
	push := o.shape
	push.Commits = 1 / float64(max(1, o.batch))
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "entries\tserver us\tcores busy\tcores to have\tclient us\tclient cores busy\tWAL B\tWAL "+
		"MB/s\tWAL GB a day\t")
	for _, way := range []struct {
		name    string
		commits float64
	}{{"batched under load", busyCommits}, {"each by itself", aloneCommits}} {
		if way.commits == aloneCommits && o.rate > aloneRateMax {
			continue
		}
		work := o.shape
		work.Commits = way.commits
		c := model.Cost(sizing.Push, push).Plus(model.Cost(sizing.Work, work))
		busy := o.rate * c.ServerMicros / 1e6
		fmt.Fprintf(tw, "%s\t%.0f\t%.2f\t%.1f\t%.0f\t%.2f\t%.0f\t%.1f\t%.0f\t\n", way.name, c.ServerMicros, busy,
			busy/o.utilization,
			c.ClientMicros, o.rate*c.ClientMicros/1e6, c.WALBytes, o.rate*c.WALBytes/1e6, o.rate*c.WALBytes*86_400/1e9)
	}
	return tw.Flush()
}
