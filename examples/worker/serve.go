package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
	"github.com/penstock/penstock/examples/worker/server"
)

// options are the flags of worker serve that are not the server's own.
type options struct {
	listen  string
	models  string
	async   string
	grace   time.Duration
	verbose bool
}

func parseServe(args []string) (options, server.Config, error) {
	var (
		o options
		c server.Config
	)
	flags := flag.NewFlagSet("worker serve", flag.ContinueOnError)
	flags.StringVar(&o.listen, "listen", "127.0.0.1:8090",
		"`address`; port 0 takes a free one, which the line \"listening on http://...\" tells")
	flags.StringVar(&o.models, "models", strings.Join(model.Names(), ","), "models to load")
	flags.StringVar(&o.async, "async", "", "`models` that always answer with a job id")
	flags.DurationVar(&o.grace, "grace", 30*time.Second, "how long SIGTERM waits for running calls")
	flags.BoolVar(&o.verbose, "verbose", false, "log every run")
	flags.IntVar(&c.Slots, "slots", 2, "calls computed at once")
	flags.IntVar(&c.DirectQueue, "direct-queue", 10, "direct callers that may wait")
	flags.DurationVar(&c.Keep, "keep", 10*time.Minute, "how long an asynchronous result can be fetched")
	flags.BoolVar(&c.AllowFaults, "allow-faults", false, "let POST /faults change the faults below")
	faultFlags(flags, &c)
	if err := flags.Parse(args); err != nil {
		return o, c, err
	}
	switch {
	case flags.NArg() > 0:
		return o, c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case c.Slots < 1 || c.DirectQueue < 1:
		return o, c, errors.New("--slots and --direct-queue must be at least 1")
	}
	c.Async = list(o.async)
	for _, name := range c.Async {
		if !slices.Contains(list(o.models), name) {
			return o, c, fmt.Errorf("--async names %q, which is not among --models %s", name, o.models)
		}
	}
	return o, c, nil
}

func faultFlags(flags *flag.FlagSet, c *server.Config) {
	duration := func(into *server.Duration, name, usage string) {
		flags.DurationVar((*time.Duration)(into), name, 0, usage)
	}
	duration(&c.Faults.Delay, "delay", "every run takes this much longer")
	duration(&c.Faults.DelayJitter, "delay-jitter", "plus up to this much, at random")
	duration(&c.Faults.SlowStart, "slow-start", "not ready for this long")
	flags.Float64Var(&c.Faults.FailRate, "fail-rate", 0, "share of runs that end in an error, 0..1")
	flags.Float64Var(&c.Faults.BusyRate, "busy-rate", 0, "share of dispatcher calls refused as busy, 0..1")
	flags.Float64Var(&c.Faults.HangRate, "hang-rate", 0, "share of runs that never end by themselves, 0..1")
	flags.Float64Var(&c.Faults.DropRate, "drop-rate", 0,
		"share of calls whose connection breaks before the answer, 0..1")
	flags.IntVar(&c.Faults.CrashAfter, "crash-after", 0, "exit in the middle of the `n`th run; 0: never")
	flags.Uint64Var(&c.Seed, "seed", 0, "of the faults' dice; the same seed rolls the same faults")
}

// serve answers calls until SIGTERM or SIGINT, then finishes what runs. A second signal exits at once.
func serve(args []string) error {
	o, cfg, err := parseServe(args)
	if err != nil {
		return ignoreHelp(err)
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	s, err := server.New(cfg)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", o.listen, err)
	}
	h := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute}
	served := make(chan error, 1)
	go func() { served <- h.Serve(listener) }()
	fmt.Printf("listening on http://%s\n", listener.Addr())

	// Callers are told 503 "starting" until the models are there, as with any real worker.
	began := time.Now()
	models, err := model.Load(list(o.models)...)
	if err != nil {
		return err
	}
	s.SetModels(models)
	cfg.Log.Info("ready", "models", o.models, "slots", cfg.Slots, "loaded_in",
		time.Since(began).Round(time.Millisecond))

	select {
	case err := <-served:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	stop() // from here on a signal has its usual effect
	return shutDown(s, h, o.grace, cfg.Log)
}

func shutDown(s *server.Server, h *http.Server, grace time.Duration, log *slog.Logger) error {
	log.Info("shutting down", "grace", grace)
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := s.Drain(ctx); err != nil {
		log.Warn("some runs did not end in time and were stopped", "grace", grace)
	}
	ctx, cancel = context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := h.Shutdown(ctx); err != nil {
		return h.Close() // only idle or stuck connections are left
	}
	return nil
}

func list(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}

func ignoreHelp(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return err
}
