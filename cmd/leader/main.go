// Command leader serves Penstock's API, and when elected performs the duties that exactly one process must perform.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/cron"
	"github.com/penstock/penstock/pkg/election"
	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

const summary = `leader takes in work over HTTP and looks after the queues.

Run as many as you like on one database: all of them serve requests, and one is elected to promote
due entries, to recover what dead nodes held, and for everything else that must be done by one alone.
SIGTERM hands over to the next one and lets requests finish; a second signal ends at once.`

func main() {
	cfg := defaults()
	config.Main(config.Program{Name: "leader", Summary: summary}, &cfg, &cfg.Log,
		func() error { return errors.Join(cfg.validate(), cfg.Database.Given(os.Getenv)) },
		func(ctx context.Context, log *slog.Logger) error { return run(ctx, cfg, log) })
}

// run is the leader from the first connection to the last. It returns nil after a signal.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	governor.LimitRuntime(log)
	pools, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer pools.close()
	listener, debug, err := listen(ctx, cfg.Leader)
	if err != nil {
		return err
	}
	defer listener.Close()
	defer debug.Close()
	forKEDA, err := listenKEDA(ctx, cfg.Leader)
	if err != nil {
		return err
	}
	if err := prepare(ctx, cfg, pools, log); err != nil || ctx.Err() != nil {
		return err
	}

	tracing, stopTracing, err := telemetry.NewTracing(ctx, "penstock-leader", cfg.Trace.Endpoint, cfg.Trace.Share)
	if err != nil {
		return err
	}
	defer stopTracing()
	l, err := newLeader(cfg, pools, log)
	if err != nil {
		return err
	}
	own, err := l.newAPI(ctx)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, own.Drain)
	dashboard, err := l.newDashboard(own)
	if err != nil {
		return err
	}
	server := dashboard.beside(own)
	context.AfterFunc(ctx, dashboard.drain)
	if tracing != nil {
		server = telemetry.Traced(tracing.Tracer(invalidation.TracerName), server)
	}
	if cfg.Leader.Insecure && cfg.Leader.TLS.Cert == "" && !config.Loopback(cfg.Leader.Listen) {
		log.Warn("tokens and payloads are served in plain text beyond this machine", "listen", cfg.Leader.Listen,
			"option", "leader.insecure_listen")
	}
	log.Info("leader started", "listen", listener.Addr().String(), "dashboard", dashboard.path(),
		"debug", debug.Addr().String(), "eligible", cfg.Leader.Election.Eligible)

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return httpserver.Serve(ctx, listener, server, log) })
	group.Go(func() error {
		metrics := promhttp.HandlerFor(l.registry(), promhttp.HandlerOpts{})
		return httpserver.Serve(ctx, debug, cfg.Leader.debug(metrics, own), log)
	})
	group.Go(func() error { return l.elector.Run(ctx, l.lead) })
	if forKEDA != nil {
		group.Go(func() error { return l.serveKEDA(ctx, forKEDA) })
	}
	if l.hinter != nil {
		group.Go(func() error { return l.hinter.Run(ctx) })
	}
	err = group.Wait()
	log.Info("leader stopped")
	return err
}

// debug is the handler of the debug address. It serves profiles only on a loopback address. Probes are there as well:
// neither the bounds on connections of clients nor their certificates concern it.
func (l Leader) debug(metrics, probes http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /livez", probes)
	mux.Handle("GET /readyz", probes)
	return httpserver.ForOperators(mux, metrics, config.Loopback(l.Debug))
}

// newAPI returns the API for clients and workers. Its readiness probe fails once ctx has ended.
func (l *leader) newAPI(ctx context.Context) (*api.API, error) {
	cfg := l.cfg.Leader
	callbacks, err := cfg.policy()
	if err != nil {
		return nil, err
	}
	reports, err := cfg.Reports.open(l.pools.api, l.log)
	if err != nil {
		return nil, err
	}
	webhooks, err := cfg.Webhook.open(l.pools.api, callbacks)
	if err != nil {
		return nil, err
	}
	lifetime := cfg.HTTP.TokenLifetime
	if lifetime == 0 {
		lifetime = -1 // where zero would be the API's default
	}
	return api.New(l.pools.api, api.Config{
		Open:          cfg.Open,
		TokenLifetime: lifetime,
		BodyBytesMax:  cfg.HTTP.BodyBytes,
		EntriesMax:    cfg.HTTP.Entries,
		Timeout:       cfg.HTTP.Timeout,
		Checks: []api.Check{{
			Name: "signal", Local: true,
			Run: func(context.Context) error { return context.Cause(ctx) },
		}},
		Observe: l.requests.observe,
		Hinter:  l.hinter,
		Reports: reports, Webhooks: webhooks,
		Log:           l.log,
		CheckCallback: callbacks.Check,
		CheckSchedule: cron.CheckSettings,
		ReadModel:     worker.EffectiveConfig,
	}), nil
}

// open returns the receiver of reports, nil if reports are not configured.
func (r Reports) open(db postgres.DB, log *slog.Logger) (api.Reports, error) {
	if r.CallbackKey == "" {
		return nil, nil //nolint:nilnil // as said
	}
	return inference.OpenReports("leader.inference.callback_key", r.CallbackKey, "", db, log)
}

// policy returns the policy for addresses that a push may name.
func (l Leader) policy() (webhook.AddressPolicy, error) {
	return webhook.NewPolicy("leader.callback", webhook.AddressConfig(l.Callback))
}

// listen opens the address for clients, and the debug address for operators.
func listen(ctx context.Context, cfg Leader) (clients, debug net.Listener, err error) {
	clients, err = httpserver.Listen(ctx, httpserver.Config{
		Address: cfg.Listen, ConnsMax: cfg.HTTP.Conns, ConnsPerAddressMax: cfg.HTTP.ConnsPerAddress,
		TLS: httpserver.TLS(cfg.TLS),
	})
	if err != nil {
		return nil, nil, err
	}
	if debug, err = httpserver.Listen(ctx, httpserver.Config{Address: cfg.Debug, ConnsMax: 16}); err != nil {
		clients.Close()
		return nil, nil, fmt.Errorf("%w; see leader.debug_listen", err)
	}
	return clients, debug, nil
}

// pools separates the connections of elections, duties, the autoscaler and requests, so that none
// waits for another's.
type pools struct {
	api, duties, scale, election *pgxpool.Pool
	dashboard                    *pgxpool.Pool // nil where there is no dashboard
	keda                         *pgxpool.Pool // nil where KEDA is not answered
}

func open(ctx context.Context, cfg Config) (*pools, error) {
	db, p := cfg.Database, &pools{}
	own := func(conns int32, timeout time.Duration) postgres.Config {
		return postgres.Config{DSN: db.URL, Pooled: db.Pooled, MaxConns: conns, StatementTimeout: timeout}
	}
	type one struct {
		pool *(*pgxpool.Pool)
		cfg  postgres.Config
	}
	all := []one{
		{&p.api, api.Pool(db.Pool(16))},
		{&p.duties, own(dutyConns(), time.Minute)},
		{&p.scale, own(scaleConns, time.Minute)},
		{&p.election, own(10, 0)},
	}
	if cfg.Leader.Dashboard.Enabled {
		all = append(all, one{&p.dashboard, dashboardPool(db)})
	}
	if cfg.Leader.Scale.KEDA != "" {
		all = append(all, one{&p.keda, own(2, 5*time.Second)})
	}
	for _, one := range all {
		pool, err := postgres.Open(ctx, one.cfg)
		if err != nil {
			p.close()
			return nil, err
		}
		*one.pool = pool
	}
	return p, nil
}

// byName returns the pools that are open, by their names in metrics.
func (p *pools) byName() map[string]*pgxpool.Pool {
	all := map[string]*pgxpool.Pool{
		"api": p.api, "duties": p.duties, "scale": p.scale, "election": p.election, "dashboard": p.dashboard,
		"keda": p.keda,
	}
	maps.DeleteFunc(all, func(_ string, pool *pgxpool.Pool) bool { return pool == nil })
	return all
}

func (p *pools) close() {
	var ends []func()
	for _, pool := range p.byName() {
		ends = append(ends, pool.Close)
	}
	postgres.Close(ends...)
}

// prepare waits for the database and for its schema. It returns early when ctx ends.
func prepare(ctx context.Context, cfg Config, p *pools, log *slog.Logger) error {
	return postgres.Wait(ctx, p.duties, log, func() error { return migrate(ctx, cfg, p.duties, log) })
}

func migrate(ctx context.Context, cfg Config, pool *pgxpool.Pool, log *slog.Logger) error {
	// The lock of a migration belongs to a session: one of a pooler would keep it for whoever gets it next.
	past := !cfg.Database.Pooled || cfg.Database.DirectURL != ""
	if !cfg.Leader.Migrate || !past {
		return migrations.Check(ctx, pool)
	}
	owns, err := migrations.Owns(ctx, pool)
	if err != nil {
		return err
	}
	if !owns { // a role with the rights of a leader and no more: another one migrates
		return migrations.Check(ctx, pool)
	}
	// A connection of its own: one of the pool waits for each answer only as long as a duty's statement may take.
	direct := pool.Config().ConnString()
	if cfg.Database.Pooled {
		direct = cfg.Database.DirectURL
	}
	conn, err := postgres.ConnConfig(postgres.Config{DSN: direct})
	if err != nil {
		return err
	}
	done, err := migrations.Up(ctx, conn)
	if done.Applied > 0 {
		log.Info("migrated the schema", "applied", done.Applied)
	}
	for _, note := range done.Notes {
		log.Warn("migrated the schema, but not all of it", "note", note)
	}
	if cfg.Database.Pooled && postgres.Disconnected(err) && migrations.Check(ctx, pool) == nil {
		log.Warn("database.direct_url does not answer; nothing is to be migrated", "error", err)
		return nil
	}
	return err
}

func electionConfig(cfg Election, log *slog.Logger) election.Config {
	return election.Config{Holder: cfg.Holder, Spectator: !cfg.Eligible, Lease: cfg.Lease, Poll: cfg.Poll, Log: log}
}
