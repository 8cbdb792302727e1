// Command gpu measures Penstock in front of a worker that computes: gpu/worker.py, a transformer on a GPU. It starts a
// private Postgres, the worker, a leader, a task node and a gateway, and compares what the worker makes when it is
// called directly, through a queue and through the gateway; then it cancels runs, kills the node, and lets two flows
// share the slots. Every figure about the worker comes from the worker: its counters and its log.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	worker, log    string // command of the worker, and the file of its log
	bin, logs      string // folders of the programs, and of what they say
	slots, longest int
	tokens, few    int
	lasts          time.Duration
	rounds         int
	only           string
}

// scenarios are in the order in which they run, with the most time that one takes.
var scenarios = []struct {
	name string
	most time.Duration
	run  func(*testbed) error
}{
	{"rate", 3 * time.Minute, rate},
	{"few", 3 * time.Minute, few},
	{"cancel", time.Minute, cancels},
	{"kill", 2 * time.Minute, kill},
	{"fairness", time.Minute, fairness},
}

func main() {
	var o options
	flag.StringVar(&o.worker, "worker", "python3 gpu/worker.py --size 8b",
		"command of the worker; --listen, --slots and --log are added")
	flag.StringVar(&o.log, "log", "/tmp/gpu-worker.jsonl", "file for the log of the worker")
	flag.StringVar(&o.bin, "bin", "../bin", "folder of the programs leader, tasknode and gateway")
	flag.StringVar(&o.logs, "logs", "", "folder for what the programs say; empty: it is dropped")
	flag.IntVar(&o.slots, "slots", 64, "slots of the worker")
	flag.IntVar(&o.tokens, "tokens", 128, "mean tokens of an answer; from half of it to half as much again")
	flag.IntVar(&o.few, "few", 16, "the same of short answers, scenario few")
	flag.IntVar(&o.longest, "longest", 900, "tokens of the answers that are cancelled, or whose node is killed")
	flag.DurationVar(&o.lasts, "for", 5*time.Second, "of each measurement")
	flag.IntVar(&o.rounds, "rounds", 2, "of direct, queue and gateway, in turns")
	flag.StringVar(&o.only, "only", "", "scenarios, separated by commas: rate, few, cancel, kill, fairness")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench-gpu:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	fmt.Printf("%s, %d cores, %d slots\n", time.Now().UTC().Format(time.DateTime), runtime.NumCPU(), o.slots)
	began := time.Now()
	p, err := newTestbed(ctx, o)
	if err != nil {
		return err
	}
	defer p.close()
	fmt.Printf("everything runs after %.1f s\n", time.Since(began).Seconds())
	var failed []error
	for _, s := range scenarios {
		if o.only != "" && !slices.Contains(strings.Split(o.only, ","), s.name) {
			continue
		}
		began := time.Now()
		// A scenario that failed leaves entries behind, too, which the next one would measure.
		if err := errors.Join(p.within(ctx, s.most, s.run), p.within(ctx, time.Minute, (*testbed).clear)); err != nil {
			fmt.Printf("%s: %s\n", s.name, err)
			failed = append(failed, fmt.Errorf("%s: %w", s.name, err))
		}
		fmt.Printf("(%s took %.1f s)\n", s.name, time.Since(began).Seconds())
	}
	return errors.Join(failed...)
}
