// Command gateway serves requests whose clients wait, on the same slots as the entries of the queues.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/gateway/openaibatch"
	"github.com/penstock/penstock/pkg/gateway/prediction"
	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

const summary = `gateway serves online requests: clients of the OpenAI API, and calls in the protocols of the workers.

It admits, orders and forwards them in memory, and takes its slots from the same rows as the entries of the queues.
Run as many as you like behind any load balancer. SIGTERM drains: new requests are refused with 503, those that wait or
are in flight have their grace. With --static it needs no database.`

func main() {
	// A gateway holds little beside the bodies on their way: to collect at each doubling of that took a
	// quarter of its CPU.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	cfg := defaults()
	config.Main(config.Program{Name: "gateway", Summary: summary}, &cfg, &cfg.Log,
		func() error { return cfg.check(os.Getenv) },
		func(ctx context.Context, log *slog.Logger) error { return run(ctx, cfg, log) })
}

// run is the gateway from the first connection to the last. It returns nil after a signal or an ordered
// drain.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	governor.LimitRuntime(log)
	if cfg.Gateway.Name == "" {
		cfg.Gateway.Name = config.ProcessName()
	}
	go new(collector).run(ctx)
	tracing, stopTracing, err := telemetry.NewTracing(ctx, "penstock-gateway", cfg.Trace.Endpoint, cfg.Trace.Share)
	if err != nil {
		return err
	}
	defer stopTracing()
	s := &server{cfg: cfg, log: log, observer: newObserver(), tracing: tracing}
	if len(cfg.Gateway.Static) > 0 {
		return s.serveStatic(ctx)
	}
	return s.serveShared(ctx)
}

// server is everything that runs in this process.
type server struct {
	cfg      Config
	log      *slog.Logger
	observer *observer
	errors   duty.Errors
	tracing  trace.TracerProvider // nil: none
	gateway  *gateway.Gateway
	listens  string        // address of the listener of clients, with its port
	debugs   string        // and that of operators
	headWait time.Duration // for the head of a request; 0: the default
	drain    func()        // ends the context of serveShared, as a signal does

	// With a database alone.
	pool     *pgxpool.Pool
	slots    *pgxpool.Pool // of the statements about slots and of heartbeats: no other one makes them wait
	member   *gateway.Registration
	leases   *gateway.Leases
	usage    *gateway.UsageMeter
	registry *inference.Registry
	listener *invalidation.Listener
	hinter   *invalidation.Hinter
	settings *settingsDuty
	batches  *openaibatch.Batches
	predicts *prediction.Predictions
}

func (s *server) config() gateway.Config {
	g := s.cfg.Gateway
	return gateway.Config{
		Open: g.Open, BodyMax: g.BodyBytes, BodiesMax: g.AllBytes, WaitingMax: g.WaitBytes, Remember: g.remember(),
		Log: s.log, Observer: s.observer, Secrets: worker.SecretStore{Dir: g.Secrets},
	}
}

// serveStatic serves the models of the command line on fixed slots.
func (s *server) serveStatic(ctx context.Context) error {
	models, err := s.cfg.Gateway.models()
	if err != nil {
		return err
	}
	cfg := s.config()
	if !cfg.Open {
		s.log.Warn("no database, no tokens: requests are let in without one", "listen", s.cfg.Gateway.Listen)
		cfg.Open = true
	}
	s.gateway = gateway.New(cfg)
	s.gateway.SetModels(models)
	s.gateway.Fixed()
	return s.listen(ctx, nil)
}

// serveShared serves the registered models on slots that are shared with the queues.
func (s *server) serveShared(ctx context.Context) error {
	ctx, s.drain = context.WithCancel(ctx)
	defer s.drain()
	db, err := penstock.Open(ctx, s.cfg.Database.Connect(6))
	if err != nil {
		return err
	}
	defer postgres.Close(db.Close)
	s.pool = db.Pool
	if s.slots, err = s.openSlots(ctx); err != nil {
		return err
	}
	defer postgres.Close(s.slots.Close)
	if err := s.assemble(db.Listen); err != nil {
		return err
	}
	if !s.settings.restore() {
		if err := s.enter(ctx); err != nil || ctx.Err() != nil {
			return err
		}
	}
	if err := s.member.Register(ctx); err != nil {
		s.log.Warn("database is away, serving from the snapshot", "error", err)
	}
	return s.listen(ctx, s.duties())
}

// enter checks the schema and reads models and settings. It waits for a database that is away, also where that goes
// away meanwhile, until ctx ends.
func (s *server) enter(ctx context.Context) error {
	return postgres.Wait(ctx, s.pool, s.log, func() error {
		if err := migrations.CheckIfReadable(ctx, s.pool); err != nil {
			return err
		}
		return s.settings.read(ctx)
	})
}

// slotConns is one connection for each statement about slots that may be under way, for the comparison and the shares,
// and for the heartbeat.
const slotConns = gateway.SlotStatements + 3

// openSlots opens the connections of the statements about slots.
func (s *server) openSlots(ctx context.Context) (*pgxpool.Pool, error) {
	c := s.cfg.Database.Pool(slotConns)
	c.MaxConns, c.Warm = slotConns, slot.Warm
	return postgres.Open(ctx, c)
}

// duties are what a gateway with a database does beside its requests, by name.
func (s *server) duties() map[string]func(context.Context) error {
	duties := map[string]func(context.Context) error{
		"member": s.member.Run, "leases": s.leases.Run, "book": s.usage.Run, "registry": s.registry.Run,
		"settings": s.settings.Run, "budgets": s.settings.RunBudgets, "batches": s.batches.Run,
		"predictions": s.predicts.Run, "hinter": s.hinter.Run,
	}
	if s.listener != nil {
		duties["hints"] = s.listener.Run
	}
	return duties
}

// unreadyTime is for how long a gateway that is ordered to drain refuses requests before it closes its listener: as
// long as Kubernetes takes to see that it is not ready, by three probes every two seconds.
const unreadyTime = 6 * time.Second

// assemble puts the parts together.
func (s *server) assemble(conn *pgx.ConnConfig) error {
	g := s.cfg.Gateway
	if s.slots == nil { // in tests, which have one pool for all
		s.slots = s.pool
	}
	s.member = gateway.NewRegistration(gateway.RegistrationConfig{
		Name: g.Name, Application: g.Application, Lease: g.Lease, Beat: min(time.Second, g.Lease/3), Log: s.log,
		Status: s.status, Drain: func(reason string) {
			s.gateway.Drain()
			s.log.Info("drain ordered", "reason", reason)
			time.AfterFunc(unreadyTime, s.drain)
		},
	}, s.slots)
	s.usage = gateway.NewUsageMeter(s.pool, s.member.ID, s.errors.Log("book", s.log))
	s.hinter = invalidation.NewHinter(s.pool, 0)
	cfg := s.config()
	cfg.Charge = s.usage
	cfg.Push = gateway.NewQueuePusher(gateway.QueuePusherConfig{
		Base: g.APIURL, Hinter: s.hinter,
		Wait: func(ctx context.Context, queue int32, entry int64) { s.predicts.Await(ctx, queue, entry) },
	}, s.pool)
	s.gateway = gateway.New(cfg)
	if err := s.mount(); err != nil {
		return err
	}
	s.leases = gateway.NewLeases(gateway.LeasesConfig{NodeLease: g.Lease, Log: s.log}, s.gateway, s.slots, s.member.ID)
	s.registry = inference.NewRegistry(s.pool, worker.Config{}, time.Second, s.errors.Log("registry", s.log))
	s.settings = &settingsDuty{
		pool: s.pool, gateway: s.gateway, registry: s.registry, node: s.member.ID, file: g.Snapshot,
		log: s.errors.Log("settings", s.log), ready: make(chan struct{}, 1),
	}
	s.registry.OnChange(s.settings.publish)
	if conn == nil {
		s.log.Warn("hand-overs cannot be heard through a pooler in transaction mode: " +
			"set database.direct_url to the address of Postgres itself")
		return nil
	}
	s.listener = invalidation.NewListener(invalidation.ListenConfig{
		Conn: conn, Log: s.log, Granted: s.leases.Granted, Slots: s.slotsMissed,
		Wake: func(int32, *invalidation.Lane) {}, // it claims no entries
	})
	return nil
}

// slotsMissed is called when a node misses slots of a model, or an instance of it became ready. It does not block.
func (s *server) slotsMissed(model string) {
	s.leases.OfferIdle(model)
	s.settings.noticed(model)
}

// listen opens the addresses, runs the duties and serves until ctx ends and what was in flight is over.
func (s *server) listen(ctx context.Context, duties map[string]func(context.Context) error) error {
	g := s.cfg.Gateway
	clients, err := httpserver.Listen(ctx, g.listener())
	if err != nil {
		return err
	}
	defer clients.Close()
	operators, err := httpserver.Listen(ctx, httpserver.Config{Address: g.Debug, ConnsMax: 64})
	if err != nil {
		return fmt.Errorf("%w; see gateway.debug_listen", err)
	}
	defer operators.Close()
	s.listens, s.debugs = clients.Addr().String(), operators.Addr().String()
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, running := errgroup.WithContext(running)
	for name, run := range duties {
		group.Go(func() error {
			if err := run(running); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	group.Go(func() error { return httpserver.Serve(running, operators, s.debug(), s.log) })
	group.Go(func() error {
		defer end()
		return s.serveClients(ctx, running, clients)
	})
	s.log.Info("gateway started", "listen", s.listens, "debug", s.debugs, "name", g.Name)
	err = group.Wait()
	if s.member != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if failed := s.member.Leave(ctx); failed != nil {
			s.log.Warn("leave", "error", failed)
		}
	}
	s.log.Info("gateway stopped")
	return err
}

// headWait is how long a connection may take for the head of a request.
const headWait = 10 * time.Second

// serveClients serves until ctx ends, then refuses what is new and waits for what is in flight.
func (s *server) serveClients(ctx, running context.Context, listener net.Listener) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	requests := &counted{Handler: s.handler()}
	front := &http.Server{
		Handler: requests, ReadHeaderTimeout: cmp.Or(s.headWait, headWait), IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10, Protocols: &protocols, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	httpserver.BoundRequests(front)
	failed := make(chan error, 1)
	go func() { failed <- front.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-running.Done():
		return front.Close()
	case <-ctx.Done():
	}
	s.gateway.Drain()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Gateway.Grace)
	defer cancel()
	if err := front.Shutdown(grace); err != nil {
		s.log.Warn("requests were cut at the end of the grace", "error", err)
		err := front.Close()
		requests.wait(cutMax)
		return err
	}
	return nil
}

// handler serves clients. Without tokens, the address alone keeps strangers out: a page in a browser on this machine
// must not get in, neither from another origin nor under a name of its own.
func (s *server) handler() http.Handler {
	g := s.cfg.Gateway
	if g.Open || len(g.Static) > 0 && config.Loopback(g.Listen) {
		return httpserver.LocalNames(http.NewCrossOriginProtection().Handler(s.traced()))
	}
	return s.traced()
}

// traced serves clients: with traces each request has a span, which its worker is told in place of the client's.
func (s *server) traced() http.Handler {
	if s.tracing == nil {
		return s.gateway
	}
	told := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(r.Header))
		s.gateway.ServeHTTP(w, r)
	})
	return telemetry.Traced(s.tracing.Tracer(invalidation.TracerName), told)
}

// cutMax bounds the wait for requests that were cut: their slots and use are given back and folded behind them.
const cutMax = 2 * time.Second

// counted counts the requests that a handler serves: http.Server.Close does not wait for those that it cuts.
type counted struct {
	http.Handler
	running atomic.Int64
}

// ServeHTTP implements http.Handler.
func (c *counted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.running.Add(1)
	defer c.running.Add(-1)
	c.Handler.ServeHTTP(w, r)
}

// wait returns when no request is served, or after the time.
func (c *counted) wait(most time.Duration) {
	for end := time.Now().Add(most); c.running.Load() > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

// status is what the gateway reports of itself with each heartbeat. Its keys are read by the SQL of the autoscaler
// (scale_online_runs), and by leaders and gateways of other versions: stock is the calls in flight.
func (s *server) status() map[string]any {
	pools := map[string]any{}
	for _, p := range s.gateway.States() {
		pools[p.Model] = map[string]any{
			"mode": p.Mode, "ceiling": p.Ceiling, "stock": p.InFlight, "waiting": p.Waiting, "held": p.Held,
			"over_limit": p.OverLimit, "dropped": p.Dropped, "instances": inUse(p.Instances),
		}
	}
	return map[string]any{
		"kind": "gateway", "pools": pools, "listen": s.listens, "debug": s.debugs, "tokens": s.gateway.TokenCounts(),
	}
}

// inUse is what the autoscaler reads of instances, see scale.instanceReport: of those with calls alone.
func inUse(instances []gateway.InstanceView) []map[string]any {
	reports := []map[string]any{}
	for _, i := range instances {
		if i.InFlight > 0 {
			reports = append(reports, map[string]any{
				"id": i.ID, "in_flight": i.InFlight, "remaining_ms": int64(i.RemainingMS),
			})
		}
	}
	return reports
}
