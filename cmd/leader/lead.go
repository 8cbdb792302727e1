package main

import (
	"context"
	"log/slog"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/batch"
	"github.com/penstock/penstock/pkg/cron"
	"github.com/penstock/penstock/pkg/election"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
	"github.com/penstock/penstock/pkg/recovery"
	"github.com/penstock/penstock/pkg/scale"
)

// leader takes part in the election and runs the duties while it is elected.
type leader struct {
	cfg      Config
	pools    *pools
	log      *slog.Logger
	elector  *election.Elector
	duties   atomic.Pointer[duties] // of the last term here; nil before the first
	hinter   *invalidation.Hinter   // nil: no hints
	metrics  telemetry.Metrics
	queues   telemetry.Bound // names that have series of their own
	others   totals          // of queues that have none
	models   telemetry.Bound
	degraded telemetry.Bound // objects of degradations
	requests *requests
	backends map[string]scale.Backend // of the autoscaler
	clock    duty.Clock               // of the database, as retention believes it in all terms
	errors   duty.Errors              // of the duties of all terms
}

func newLeader(cfg Config, p *pools, log *slog.Logger) (*leader, error) {
	backends, err := backends(cfg.Leader, log)
	if err != nil {
		return nil, err
	}
	m := telemetry.NewMetrics()
	l := &leader{
		cfg: cfg, pools: p, log: log, metrics: m, requests: newRequests(m),
		elector:  election.New(p.election, electionConfig(cfg.Leader.Election, log)),
		backends: backends,
		models:   telemetry.Bound{Max: telemetry.ModelsMax},
	}
	if cfg.Leader.Hints {
		l.hinter = invalidation.NewHinter(p.duties, 0)
	}
	return l, nil
}

// duties are the duties of the elected leader. Each writes only within its term.
type duties struct {
	locks      *recovery.Locks
	deadlines  *maintenance.Deadlines
	operations *maintenance.Operations
	retention  *maintenance.Retention
	compaction *maintenance.Compaction
	depths     *maintenance.Depths
	samples    *maintenance.Samples
	brake      *maintenance.Brake
	cron       *cron.Engine
	batches    *batch.Stepper
	scaler     *scale.Duty
}

// lead runs every duty until the term ends. If one of them fails or panics, all end and the leader resigns.
func (l *leader) lead(ctx context.Context, term election.Term) error {
	db, fence := l.pools.duties, term.Fence(l.pools.duties)
	scaling := l.pools.scale
	hint, log, settings := l.hinter.Hint, l.log.With("term", term), l.cfg.Leader
	logOf := func(name string) *slog.Logger { return l.errors.Log(name, log) }
	cfg := maintenance.Config{
		Pause:          settings.Recovery.Pause,
		AuditRetention: settings.Recovery.AuditRetention,
		Brake:          settings.Brake.config(),
		Clock:          &l.clock,
		Hint:           hint,
	}
	of := func(name string) maintenance.Config {
		cfg.Log = logOf(name)
		return cfg
	}
	d := &duties{
		locks: recovery.NewLocks(db, fence, recovery.Config{
			Pause:           settings.Recovery.Pause,
			PassLocksMax:    settings.Recovery.Locks,
			SuspendShare:    settings.Recovery.SuspendShare,
			SuspendNodesMin: settings.Recovery.SuspendNodes,
			NodeRetention:   settings.Recovery.NodeRetention,
			Hint:            l.hinter.HintLanes,
			Log:             logOf("recovery"),
		}),
		deadlines:  maintenance.NewDeadlines(db, fence, of("deadlines")),
		operations: maintenance.NewOperations(db, fence, of("operations")),
		retention:  maintenance.NewRetention(db, fence, of("retention")),
		compaction: maintenance.NewCompaction(db, fence, of("compaction")),
		depths:     maintenance.NewDepths(db, fence, of("depths")),
		samples:    maintenance.NewSamples(db, fence, of("samples")),
		cron:       cron.New(db, fence, cron.Config{Hint: hint, Clock: &l.clock, Log: logOf("cron")}),
		batches:    batch.NewStepper(db, fence, batch.Config{Hint: hint, Clock: &l.clock, Log: logOf("batches")}),
		scaler:     scale.New(scaling, term.Fence(scaling), scale.Config{Log: logOf("scale"), Backends: l.backends}),
	}
	d.brake = maintenance.NewBrake(db, fence, of("brake"), d.samples.Latest)
	l.duties.Store(d)

	group, ctx := errgroup.WithContext(ctx)
	wake := func(ctx context.Context) error { return wakeScaler(ctx, l.cfg.Database, d.scaler, log) }
	for _, run := range append(d.runs(), d.scaler.Run, wake) {
		group.Go(func() error { return duty.Protect(ctx, log, func() error { return run(ctx) }) })
	}
	return group.Wait()
}

// runs are the loops of all duties but the autoscaler, which has connections of its own. Each of them uses one
// connection at a time: their number is that of the connections that they share.
func (d *duties) runs() []func(context.Context) error {
	return []func(context.Context) error{
		d.locks.Run, d.deadlines.Run, d.operations.Run, d.retention.Run, d.compaction.Run, d.depths.Run,
		d.samples.Run, d.brake.Run, d.cron.Run, d.batches.Run,
	}
}

const (
	// spareConns are beside those of the duties: for hints, and for the size of the database, which the brake may
	// wait for longer than a pass.
	spareConns = 2
	scaleConns = 4 // of the autoscaler: its passes, and the calls of scale.turnsMax deployments
)

// dutyConns is how many connections the duties share, so that a slow one keeps no other from its work.
func dutyConns() int32 {
	var d duties
	conns := int32(spareConns)
	for range d.runs() {
		conns++
	}
	return conns
}
