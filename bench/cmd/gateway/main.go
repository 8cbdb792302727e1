// Command gateway measures the online gateway, and prints each target beside its figure. Some scenarios load it and, in
// the same run, a plain httputil.ReverseProxy in front of the same worker, and print the ratios: each of the two is a
// process of its own, so that its CPU time can be told apart from that of the generator and the worker, which share the
// machine with it. Others have a private Postgres, and share slots between gateways and a queue.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	program := flag.String("gateway", "../bin/gateway", "the gateway program")
	tasknode := flag.String("tasknode", "../bin/tasknode", "the program of task nodes")
	lasts := flag.Duration("for", 8*time.Second, "half of the time of each load on each proxy; 15s at most")
	only := flag.String("only", "", "scenarios, separated by commas: "+strings.Join(names(), ", "))
	short := flag.Bool("short", false, "3 s of each load, and fewer rounds")
	plain := flag.String("plain", "", "be the plain proxy in front of this worker (for the program itself)")
	flag.Parse()
	if *short {
		*lasts = 3 * time.Second
	}
	if *plain != "" {
		servePlain(*plain)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	r := &run{ctx: ctx, program: *program, tasknode: *tasknode, lasts: min(*lasts, 15*time.Second), short: *short}
	if err := r.all(*only); err != nil {
		fmt.Fprintln(os.Stderr, "bench-gateway:", err)
		os.Exit(1)
	}
}

func names() (list []string) {
	for _, s := range scenarios {
		list = append(list, s.name)
	}
	return list
}

// servePlain is what the gateway is compared with: a proxy that knows nothing, tuned as one would tune it.
func servePlain(worker string) {
	target, err := url.Parse(worker)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
	listen(proxy)
}

// loadAverage is that of the last 1, 5 and 15 minutes: figures of a machine with other load say little.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 3 {
		return "unknown"
	}
	return strings.Join(fields[:3], " ")
}

// process is a program under load.
type process struct {
	name  string
	cmd   *exec.Cmd
	url   string
	debug string  // address of the metrics; empty: it has none
	idle  float64 // MiB of memory before the load
	first float64 // and at the end of its first second
}

// start starts a program and waits until it says its address behind a sign.
func start(ctx context.Context, name, sign string, args ...string) (*process, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // programs of ours
	cmd.Env = append(os.Environ(), "GOGC=400")
	out, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout = cmd.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := await(out, sign)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &process{
		name: name, cmd: cmd, url: "http://" + wordBehind(line, sign), debug: wordBehind(line, "debug="),
	}, nil
}

// run is one run of the program.
type run struct {
	ctx               context.Context //nolint:containedctx // of the scenario that runs
	program, tasknode string
	lasts             time.Duration
	short             bool
	headed            bool // the head of the figures beside a plain proxy is printed
	table             table
}

// all runs the scenarios and prints the table. A scenario that fails does not keep the others from running.
func (r *run) all(only string) error {
	fmt.Printf("%s, %d cores, load average before the run: %s\n", time.Now().UTC().Format(time.DateTime),
		runtime.NumCPU(), loadAverage())
	var wanted []string
	if only != "" {
		wanted = strings.Split(only, ",")
	}
	for _, name := range wanted {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("there is no scenario %q: there are %s", name, strings.Join(names(), ", "))
		}
	}
	var failed []error
	ctx := r.ctx
	for _, s := range scenarios {
		if len(wanted) > 0 && !slices.Contains(wanted, s.name) {
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, s.most)
		r.ctx = bounded
		if err := s.run(r); err != nil {
			fmt.Printf("%s: %s\n", s.name, err)
			failed = append(failed, fmt.Errorf("%s: %w", s.name, err))
		}
		cancel()
	}
	r.table.print()
	fmt.Printf("load average after the run: %s\n", loadAverage())
	return errors.Join(failed...)
}

// startStatic starts a gateway on fixed slots of one worker, without a database.
func (r *run) startStatic(worker string, slots int) (*process, error) {
	return start(r.ctx, "gateway", "listen=", r.program, "--open", "--listen", "127.0.0.1:0",
		"--debug-listen", "127.0.0.1:0", "--static", "m="+worker+"#"+strconv.Itoa(slots), "--remember", "10000")
}

// compare loads two processes in turns, so that other load on the machine meets both alike. Each has twice r.lasts in
// all, after a second that does not count.
func (r *run) compare(l load, plain, front *process) [2]figures {
	both := [2]*process{plain, front}
	var list [2][]figures
	for _, p := range both {
		p.warm(r.ctx, l)
	}
	for n := range l.rounds {
		for i := range both {
			i = (i + n) % 2 // neither is always the one behind the other
			list[i] = append(list[i], both[i].measure(r.ctx, l, 2*r.lasts/time.Duration(l.rounds)))
			time.Sleep(200 * time.Millisecond) // sockets of the one settle before the other is measured
		}
	}
	return [2]figures{summary(list[0]), summary(list[1])}
}

// proxied returns the scenario of a load on the gateway and on a plain proxy.
func proxied(name string) func(*run) error {
	return func(r *run) error {
		worker := startWorker()
		defer worker.Close()
		self, err := os.Executable()
		if err != nil {
			return err
		}
		plain, err := start(r.ctx, "plain", "listening on ", self, "-plain", worker.URL)
		if err != nil {
			return err
		}
		defer plain.stop()
		front, err := r.startStatic(worker.URL, 4096)
		if err != nil {
			return err
		}
		defer front.stop()
		if !r.headed {
			r.headed = true
			fmt.Printf("%-10s %-8s %9s %9s %9s %9s %8s %9s\n", "load", "proxy", "rate/s", "p50", "p99", "CPU s",
				"errors", "MiB")
		}
		l := loadOf(name)
		both := r.compare(l, plain, front)
		for i, p := range []*process{plain, front} {
			both[i].print(l.name, p.name)
		}
		ratio(l.name, both[0], both[1])
		l.judge(&r.table, both[0], both[1])
		if name != "whole" {
			return nil
		}
		p50, p99, err := front.ownTimes(r.ctx)
		r.table.most(name, "own time without queue and worker, p50 below", 60, p50, "us")
		r.table.most(name, "own time without queue and worker, p99 below", 1000, p99, "us")
		return err
	}
}
