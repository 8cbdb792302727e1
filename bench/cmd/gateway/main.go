// Command gateway loads the online gateway and, in the same run, a plain httputil.ReverseProxy in front of
// the same worker, and prints the figures of both and their ratios. Each of the two is a process of its own,
// so that its CPU time can be told apart from that of the generator and the worker, which share the machine
// with it.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

func main() {
	program := flag.String("gateway", "../bin/gateway", "the gateway program")
	lasts := flag.Duration("for", 10*time.Second, "of each load")
	only := flag.String("only", "", "loads whose names contain this")
	short := flag.Bool("short", false, "3 s of each load")
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
	if err := run(ctx, *program, *lasts, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench-gateway:", err)
		os.Exit(1)
	}
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

// proxied is a process under load.
type proxied struct {
	name string
	cmd  *exec.Cmd
	url  string
}

func start(ctx context.Context, name, sign string, args ...string) (*proxied, error) {
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
	address, err := await(out, sign)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &proxied{name, cmd, "http://" + strings.TrimPrefix(address, "http://")}, nil
}

func run(ctx context.Context, program string, lasts time.Duration, only string) error {
	worker := startWorker()
	defer worker.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	plain, err := start(ctx, "plain", "listening on ", self, "-plain", worker.URL)
	if err != nil {
		return err
	}
	defer plain.stop()
	front, err := start(ctx, "gateway", "listen=", program, "--open", "--listen", "127.0.0.1:0",
		"--debug-listen", "127.0.0.1:0",
		"--static", "m="+worker.URL+"#4096", "--remember", "10000")
	if err != nil {
		return err
	}
	defer front.stop()
	fmt.Printf("%s, %d cores, load average before the run: %s\n", time.Now().UTC().Format(time.DateTime),
		runtime.NumCPU(),
		loadAverage())
	fmt.Printf("%-10s %-8s %9s %9s %9s %9s %8s %9s\n", "load", "proxy", "rate/s", "p50", "p99", "CPU s",
		"errors", "MiB")
	for _, l := range loads() {
		if !strings.Contains(l.name, only) {
			continue
		}
		var figures [2]figures
		for i, p := range []*proxied{plain, front} {
			figures[i] = p.measure(ctx, l, lasts)
			figures[i].print(l.name, p.name)
			time.Sleep(time.Second) // sockets of the one settle before the other is measured
		}
		ratio(l.name, figures[0], figures[1])
	}
	return nil
}
