// Command peers compares Penstock with other Postgres queues on one private, durable Postgres and prints a table.
//
//	go run ./cmd/peers -short                       10,000 entries, one round
//	go run ./cmd/peers -n 100000 -rounds 3          the published comparison
//	go run ./cmd/peers -contenders river -scenarios solo,held
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/penstock/penstock/bench/peers"
	"github.com/penstock/penstock/internal/devpostgres"
)

// Contenders written in Go run in a process of this same program, those for Node under peers/node.
// A contender's module or package tells its version.
var (
	inGo = map[string]struct {
		module string
		make   func(peers.Step) peers.Contender
	}{
		"penstock": {"github.com/penstock/penstock", func(peers.Step) peers.Contender { return &peers.Penstock{} }},
		"penstock-results": {
			"github.com/penstock/penstock",
			func(peers.Step) peers.Contender { return &peers.Penstock{KeepResults: true} },
		},
		"penstock-inference": {
			"github.com/penstock/penstock",
			func(s peers.Step) peers.Contender { return &peers.Penstock{Inference: true, WorkerURL: s.Worker} },
		},
		"river": {"github.com/riverqueue/river", func(peers.Step) peers.Contender { return &peers.River{} }},
	}
	onNode = map[string]struct{ script, module string }{
		"graphile":      {"graphile", "graphile-worker"},
		"graphile-call": {"graphile-call", "graphile-worker"},
		"pgboss":        {"pgboss", "pg-boss"},
	}
)

const everyContender = "penstock,penstock-results,penstock-inference,river,graphile,graphile-call,pgboss"

// serverSettings are the same for all. Checkpoints are made between measurements, so that full-page images
// (which depend on when a checkpoint happens) do not blur the WAL of an entry.
var serverSettings = map[string]string{
	"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
	"shared_buffers": "1GB", "max_wal_size": "16GB", "checkpoint_timeout": "1h",
}

// connectionsMax is how many connections a process of a contender has at most.
const connectionsMax = 100

func settingsFor(contenders []peers.Command) map[string]string {
	settings := maps.Clone(serverSettings)
	most := 1
	for _, c := range contenders {
		most = max(most, c.Processes)
	}
	settings["max_connections"] = strconv.Itoa(most * connectionsMax)
	return settings
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "peers:", err)
		stop()
		os.Exit(1)
	}
}

type options struct {
	sizes                    peers.Sizes
	rounds                   int
	short                    bool
	patience                 time.Duration
	contenders, scenarios    string
	nodeDir, csvTo, jsonTo   string
	child, childDSN, stepArg string
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.IntVar(&o.sizes.Entries, "n", 100_000, "entries to push and drain")
	f.IntVar(&o.sizes.GroupSize, "group", 50, "entries of one ordered group")
	f.IntVar(&o.sizes.Backlog, "backlog", 500_000, "further entries waiting in scenario backlog")
	f.IntVar(&o.sizes.Conns, "conns", 16, "connections of single pushes")
	f.IntVar(&o.sizes.Pickups, "pickups", 2000,
		"entries of a latency measurement by default settings; the others have a fifth of it")
	f.Float64Var(&o.sizes.Seconds, "seconds", 10, "length of sustained push and work")
	f.IntVar(&o.sizes.PayloadBytes, "payload", 50, "bytes of JSON in an entry")
	f.IntVar(&o.rounds, "rounds", 3, "how often each contender has its turn")
	f.DurationVar(&o.patience, "patience", 10*time.Minute, "for one step of a contender, which fails after it")
	f.BoolVar(&o.short, "short", false, "10,000 entries, 100 pick-ups, 3 s, one round, except for what is given")
	f.StringVar(&o.contenders, "contenders", everyContender,
		"who takes part, in this order; graphile:8 has eight processes, in drains and in push and work at once")
	f.StringVar(&o.scenarios, "scenarios",
		"bulk,single,single-apart,solo,groups,sustained,pickup,pickup-tuned,pickup-polling",
		"what is measured; also: held, backlog, or all")
	f.StringVar(&o.nodeDir, "node", "peers/node", "folder of the Node contenders, with node_modules")
	f.StringVar(&o.csvTo, "csv", "", "file for every single run as CSV")
	f.StringVar(&o.jsonTo, "json", "", "file for every single run as JSON")
	f.StringVar(&o.child, "child", "", "internal: be the process of this contender")
	f.StringVar(&o.childDSN, "dsn", "", "internal: the child's database")
	f.StringVar(&o.stepArg, "step", "", "internal: the child's step")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.short {
		given := map[string]bool{}
		f.Visit(func(option *flag.Flag) { given[option.Name] = true })
		o.shorten(given)
	}
	return o, nil
}

// shorten makes small what was not given.
func (o *options) shorten(given map[string]bool) {
	if !given["n"] {
		o.sizes.Entries = 10_000
	}
	if !given["backlog"] {
		o.sizes.Backlog = 50_000
	}
	if !given["pickups"] {
		o.sizes.Pickups = 100
	}
	if !given["seconds"] {
		o.sizes.Seconds = 3
	}
	if !given["rounds"] {
		o.rounds = 1
	}
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.child != "" {
		return runChild(ctx, o)
	}
	return compare(ctx, o)
}

func runChild(ctx context.Context, o options) error {
	var step peers.Step
	if err := json.Unmarshal([]byte(o.stepArg), &step); err != nil {
		return fmt.Errorf("read the step: %w", err)
	}
	return peers.RunChild(ctx, inGo[o.child].make(step), o.childDSN, step, os.Stdin, os.Stdout)
}

func compare(ctx context.Context, o options) (err error) {
	contenders, err := commands(o)
	if err != nil {
		return err
	}
	scenarios, err := chosen(o)
	if err != nil {
		return err
	}
	server, err := devpostgres.Start(ctx, devpostgres.Config{Settings: settingsFor(contenders)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()

	fmt.Printf("%d CPUs; %s; payload %d B, groups of %d, %d single-push connections, medians of %d rounds\n",
		runtime.NumCPU(), server.Source(), o.sizes.PayloadBytes, o.sizes.GroupSize, o.sizes.Conns, o.rounds)
	runner := peers.Runner{
		Server: server.Config(), Contenders: contenders, Rounds: o.rounds,
		StepTimeout: o.patience, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	runs, err := runner.Run(ctx, scenarios)
	return errors.Join(
		err, // what was measured before is shown all the same
		peers.WriteTable(os.Stdout, scenarios, contenders, runs),
		peers.WriteTargets(os.Stdout, runs),
		save(o.csvTo, func(w io.Writer) error { return peers.WriteCSV(w, runs) }),
		save(o.jsonTo, func(w io.Writer) error { return json.NewEncoder(w).Encode(runs) }))
}

func commands(o options) ([]peers.Command, error) {
	var all []peers.Command
	for given := range strings.SplitSeq(o.contenders, ",") {
		name, processes, err := several(given)
		if err != nil {
			return nil, err
		}
		var command peers.Command
		if _, ok := inGo[name]; ok {
			command, err = goCommand(name)
		} else if _, ok := onNode[name]; ok {
			command, err = nodeCommand(name, o.nodeDir)
		} else {
			err = fmt.Errorf("no such contender: %q (there are %s)", name, everyContender)
		}
		if err != nil {
			return nil, err
		}
		command.Name, command.Processes = given, processes
		all = append(all, command)
	}
	return all, nil
}

// several splits the name of a contender from the count of its processes.
func several(given string) (name string, processes int, err error) {
	name, count, found := strings.Cut(given, ":")
	if !found {
		return name, 1, nil
	}
	if processes, err = strconv.Atoi(count); err != nil || processes < 1 {
		return "", 0, fmt.Errorf("contender %q: the processes are no number above 0", given)
	}
	return name, processes, nil
}

func goCommand(name string) (peers.Command, error) {
	self, err := os.Executable()
	if err != nil {
		return peers.Command{}, fmt.Errorf("find this program: %w", err)
	}
	command := peers.Command{Name: name, Args: func(dsn string, step peers.Step) []string {
		return []string{self, "-child", name, "-dsn", dsn, "-step", encode(step)}
	}}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == inGo[name].module && module.Replace == nil { // this tree has no version
				command.Version = strings.TrimPrefix(module.Version, "v")
			}
		}
	}
	return command, nil
}

func nodeCommand(name, dir string) (peers.Command, error) {
	contender := onNode[name]
	text, err := os.ReadFile(filepath.Join(dir, "node_modules", contender.module, "package.json"))
	if err != nil {
		return peers.Command{}, fmt.Errorf("find %s: %w: run npm ci in %s first", name, err, dir)
	}
	var about struct{ Version string }
	if err := json.Unmarshal(text, &about); err != nil {
		return peers.Command{}, fmt.Errorf("read the version of %s: %w", name, err)
	}
	return peers.Command{Name: name, Version: about.Version, Args: func(dsn string, step peers.Step) []string {
		node, child := filepath.Join(dir, "node_modules/.bin/node"), filepath.Join(dir, "child.js")
		return []string{node, child, contender.script, dsn, encode(step)}
	}}, nil
}

func encode(step peers.Step) string {
	text, _ := json.Marshal(step) // numbers, a string and a boolean cannot fail
	return string(text)
}

func chosen(o options) ([]peers.Scenario, error) {
	all := peers.Scenarios(o.sizes)
	if o.scenarios == "all" {
		return all, nil
	}
	var some []peers.Scenario
	for _, name := range strings.Split(o.scenarios, ",") {
		i := slices.IndexFunc(all, func(s peers.Scenario) bool { return s.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("no such scenario: %q", name)
		}
		some = append(some, all[i])
	}
	return some, nil
}

func save(path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("save results: %w", err)
	}
	return errors.Join(write(file), file.Close())
}
