// Command tasknode claims entries and runs them: inference by the instances of their models, webhooks by
// itself, and the entries of queues that declare statements by those.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

const summary = `tasknode claims entries of one application's queues and runs them.

It serves every inference queue, the webhook queue, and queues of other kinds that declare in SQL what to run for
their entries (penstock.set_statements); programs with handlers of their own use pkg/tasknode.
Run as many as you like. SIGTERM drains: nothing more is claimed, what runs has its grace, the rest goes back
into line and spends no attempt. A second signal ends at once.`

func main() {
	// A node holds little, its slots and a batch: to collect it at each doubling took a seventh of its CPU.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	cfg := defaults()
	config.Main(config.Program{Name: "tasknode", Summary: summary}, &cfg, &cfg.Log,
		func() error { return errors.Join(cfg.validate(), cfg.Database.Given(os.Getenv)) },
		func(ctx context.Context, log *slog.Logger) error { return run(ctx, cfg, log) })
}

// run is the node from the first connection to the last. It returns nil after a signal or an ordered drain.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	governor.LimitRuntime(log)
	db, err := penstock.Open(ctx, cfg.Database.Connect(4))
	if err != nil {
		return err
	}
	defer postgres.Close(db.Close)
	tracing, stopTracing, err := telemetry.NewTracing(ctx, "penstock-tasknode", cfg.Trace.Endpoint, cfg.Trace.Share)
	if err != nil {
		return err
	}
	defer stopTracing()
	err = postgres.Wait(ctx, db.Pool, log, func() error {
		if err := db.Beats.Ping(ctx); err != nil {
			return err
		}
		return migrations.CheckIfReadable(ctx, db.Pool)
	})
	if err != nil || ctx.Err() != nil {
		return err
	}
	n, err := newNode(cfg, db, tracing, log)
	if err != nil {
		return err
	}
	t := cfg.TaskNode
	listener, err := httpserver.Listen(ctx, httpserver.Config{
		Address: t.Listen, ConnsMax: t.ConnsMax, ConnsPerAddressMax: t.PerAddress,
		TLS: httpserver.TLS(t.TLS),
	})
	if err != nil {
		return err
	}
	defer listener.Close()
	log.Info("task node started", "listen", listener.Addr().String(), "node", n.cfg.TaskNode.Name, "application",
		cfg.TaskNode.Application)
	err = n.run(ctx, listener)
	log.Info("task node stopped")
	return err
}

// node is everything that runs in this process.
type node struct {
	cfg       Config
	log       *slog.Logger
	claims    *pgxpool.Pool
	beats     *pgxpool.Pool
	observer  *observer
	errors    duty.Errors
	task      *tasknode.Node
	ranker    *fairness.Ranker
	inference *inference.Service
	reports   *inference.Reports // nil: asynchronous workers have nowhere to report to
	governor  *governor.Governor
	declared  *statements
	listener  *invalidation.Listener
}

func newNode(cfg Config, db *penstock.DB, tracing trace.TracerProvider, log *slog.Logger) (*node, error) {
	claims, beats := db.Pool, db.Beats
	t := &cfg.TaskNode
	if t.Name == "" {
		t.Name = config.ProcessName()
	}
	n := &node{cfg: cfg, log: log, claims: claims, beats: beats, observer: newObserver()}
	var err error
	if n.declared, err = newStatements(cfg.Database); err != nil {
		return nil, err
	}
	n.ranker = fairness.NewRanker(fairness.RankerConfig{
		Application: t.Application, Log: n.errors.Log("fairness", log),
	}, claims)
	service, err := t.Inference.service(claims, log)
	if err != nil {
		return nil, err
	}
	n.reports = service.Reports
	service.Adapters = worker.Config{Secret: worker.SecretStore{Dir: t.Secrets}.Read}
	service.Freed = func() { n.task.TryAgain() }
	service.Log = n.errors.Log("inference", log)
	n.inference = inference.NewService(service, claims, func() invalidation.NodeID { return n.task.ID() })
	threads := t.Webhook.threads(t.Threads)
	deliveries := newBudget(threads)
	gates := []tasknode.Gate{slots{n.inference.Pool, n.observer}, n.declared, deliveries}
	queues := n.declared.served
	if t.Governor {
		needs, err := t.needs()
		if err != nil {
			return nil, err
		}
		if n.governor, err = governor.New(t.marks(), governor.NewMachine(), log); err != nil {
			return nil, err
		}
		gates = append(gates, resources{n.governor, n.observer})
		declare := n.declare(needs)
		queues = func(list []*invalidation.Queue) {
			n.declared.served(list)
			declare(list)
		}
	}
	var tracer trace.Tracer
	if tracing != nil {
		tracer = tracing.Tracer(invalidation.TracerName)
	}
	var threadsFor func() int
	if t.Threads == 0 {
		threadsFor = func() int { return n.inference.Registry.Threads(t.Application) }
	}
	n.task = tasknode.New(tasknode.Config{
		Name: t.Name, Application: t.Application, Threads: t.Threads, ThreadsFor: threadsFor,
		SchedulingThreads: t.SchedulingThreads,
		Lease:             t.Lease, Beat: t.Beat, Poll: t.Poll, Grace: t.grace(), Log: log, Gates: gates,
		Ranker:   n.ranker,
		Observer: n.observer, Tracer: tracer,
		Affinity: n.inference.Pool, Queues: queues, Status: n.report,
	}, claims, beats)
	n.task.HandleStatements(n.declared.handler)
	n.task.HandleKind(invalidation.KindInference, n.inference.Dispatcher)
	if err := n.deliver(t.Webhook, deliveries, max(1, threads/2)); err != nil {
		return nil, err
	}
	n.listener = newListener(cfg, db.Listen, n.task, n.inference, log)
	return n, nil
}

// newListener returns the duty that hears hints, or nil where the node finds work by polling alone.
func newListener(cfg Config, conn *pgx.ConnConfig, task *tasknode.Node, models *inference.Service, log *slog.Logger,
) *invalidation.Listener {
	if !cfg.TaskNode.Hints {
		return nil
	}
	if conn == nil {
		log.Warn("hints cannot be heard through a pooler in transaction mode: set database.direct_url to the " +
			"address of Postgres itself")
		return nil
	}
	return invalidation.NewListener(invalidation.ListenConfig{
		Conn: conn, Wake: task.Wake, Cancelled: task.Cancelled,
		Slots: models.Noticed, Starting: models.Starting, Log: log,
	})
}

// deliver makes the node serve the queue of callbacks with a budget of threads, of which unproven may wait
// for receivers that did not answer promptly last time.
func (n *node) deliver(w Webhook, budget *budget, unproven int) error {
	cfg, err := w.config(worker.SecretStore{Dir: n.cfg.TaskNode.Secrets})
	if err != nil {
		return err
	}
	if w.Key == "" {
		n.log.Info("callbacks wait: tasknode.webhook.key is not set")
	}
	cfg.Unproven = unproven
	budget.add(webhookQueue) // no other queue of the kind takes pushes
	n.task.HandleKind(invalidation.KindWebhook, webhook.NewHandler(cfg, n.claims, n.log))
	return nil
}

// declare tells the governor the needs of the queues that the node serves: what the node's own options
// say, else the queue's setting.
func (n *node) declare(own map[string]governor.Need) func([]*invalidation.Queue) {
	return func(queues []*invalidation.Queue) {
		served := make(map[string]bool, len(queues))
		for _, q := range queues {
			served[q.Name] = true
			need, declared := own[q.Name]
			if !declared {
				set := q.Config.Needs
				need = governor.Need{CPU: set.CPU, MemoryBytes: int64(set.MemoryMiB * (1 << 20))}
			}
			if err := n.governor.Declare(q.Name, need); err != nil {
				n.log.Error("needs of a queue", "queue", q.Name, "error", err)
			}
		}
		n.governor.Keep(served)
	}
}

// run starts every duty of the node and returns when the task node has drained. The duties that its runs lean on
// (slots, models) end after it.
func (n *node) run(ctx context.Context, listener net.Listener) error {
	duties, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer postgres.Close(n.declared.pool.Close)
	group, duties := errgroup.WithContext(duties)
	err := postgres.Wait(ctx, n.claims, n.log, func() error { return n.inference.Registry.Refresh(ctx) })
	if err != nil {
		return fmt.Errorf("read models: %w", err)
	}
	for _, run := range n.inference.Duties() {
		group.Go(func() error { return run(duties) })
	}
	group.Go(func() error { return n.ranker.Run(duties) })
	if n.governor != nil {
		group.Go(func() error { return n.governor.Run(duties) })
	}
	if n.listener != nil {
		group.Go(func() error { return n.listener.Run(duties) })
	}
	routes := n.routes(api.Check{
		Name: "draining", Local: true,
		Run: func(context.Context) error { return context.Cause(ctx) },
	})
	group.Go(func() error { return httpserver.Serve(duties, listener, routes, n.log) })
	working, drain := context.WithCancel(ctx) // a duty that ends drains the node: its runs lean on all of them
	defer drain()
	defer context.AfterFunc(duties, drain)()
	group.Go(func() error {
		defer end()
		return n.task.Run(working)
	})
	return group.Wait()
}

// routes are the probes, and where workers report.
func (n *node) routes(draining api.Check) http.Handler {
	cfg := api.Config{
		Checks:  []api.Check{{Name: "database", Run: n.beats.Ping}, draining},
		Metrics: promhttp.HandlerFor(n.registry(), promhttp.HandlerOpts{}), Log: n.log,
	}
	if n.reports != nil {
		cfg.Reports = n.reports
	}
	return api.NewProbes(cfg)
}

// resources is the governor as a gate of the task node, whose refusals are counted.
type resources struct {
	*governor.Governor
	*observer
}

// Take implements tasknode.Gate. The threads for the entries that a node asks for are free.
func (r resources) Take(queue string, want int) (int, func(n int)) {
	verdict, hold := r.Governor.Take(queue, want, want)
	if verdict.Allow == 0 {
		for _, reason := range verdict.Reasons {
			r.Refused(queue, string(reason.Code))
		}
	}
	return verdict.Allow, func(n int) { r.Release(hold, n) }
}
